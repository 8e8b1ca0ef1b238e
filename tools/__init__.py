"""What builds and checks this repository, and is not part of the package."""
