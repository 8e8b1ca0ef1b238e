"""Sphinx: ``make docs`` builds the site from the checkout's root, so that links work on the site as in the files."""

import sys
from pathlib import Path

import kernel_pytorch

sys.path.insert(0, str(Path(__file__).parents[1]))  # tools.website

project = "KernelPyTorch"
version = release = kernel_pytorch.__version__
copyright = "the KernelPyTorch authors"  # noqa: A001 - Sphinx's name

extensions = ["myst_parser", "sphinx_copybutton", "tools.website.site"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "demos/*.md"]
exclude_patterns = [".*", "src", "tests", "tools", "benchmarks", "build", "dist", "docs/_*"]
nitpicky = True

# The navigation: captions with pages or patterns. A page that is in none fails the build.
site_map = {
    "Start": ["docs/setup", "docs/tutorials/*", "demos/README", "docs/README"],
    "Guides": [
        "docs/optimize",
        "docs/attention",
        "docs/fp8",
        "docs/guides/choosing-an-fp8-recipe",
        "docs/context_parallel",
        "docs/guides/context-parallel-with-torchrun",
        "docs/lowering",
    ],
    "Hardware": [
        "docs/hardware",
        "docs/support",
        "docs/backends/README",
        "docs/backends/*/*-overview",
        "docs/backends/adding-a-backend",
    ],
    "Performance": ["docs/performance", "BENCHMARKS"],
    "Reference": ["API"],
    "Project": ["README", "docs/architecture", "CONTRIBUTING", "docs/releases", "CHANGELOG"],
}
below = {
    "API": ["docs/api/*"],
    "docs/backends/README": ["docs/backends/gpu/*", "docs/backends/gpu/*/*"],
}
"""Pages that are listed below another in the navigation."""

wide_pages = ["BENCHMARKS", "docs/index", "docs/support"]  # their tables have the place of the table of contents

myst_heading_anchors = 4  # as GitHub makes them, so that a link works in both places

html_theme = "furo"
html_title = "KernelPyTorch"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = [("tables.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db4f0", "color-brand-content": "#7db4f0"},
}
pygments_style, pygments_dark_style = "friendly", "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
