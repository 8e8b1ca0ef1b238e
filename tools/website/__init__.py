"""The documentation site: generated pages, measured numbers, plots, and the Sphinx extension."""
