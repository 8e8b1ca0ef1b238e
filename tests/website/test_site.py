"""The site: it builds without a warning, refuses what is not backed, and works in a browser, on a phone too."""

import functools
import http.server
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

bs4 = pytest.importorskip("bs4", reason="the extra docs is not installed")
pytest.importorskip("furo", reason="the extra docs is not installed")

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "--builder", "html"]
    command = [sys.executable, "-m", "sphinx", *options, "--conf-dir", str(source / "docs"), str(source), str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Any]:
    pages = sorted(site.rglob("*.html"))
    return {page: bs4.BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser") for page in pages}


# The build


def test_every_page_of_the_checkout_is_on_the_site(site: Path) -> None:
    assert len(list(site.glob("docs/api/*.html"))) >= 8
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "demos").glob("*.md")]
    missing = [page for page in pages if not (site / page.relative_to(ROOT)).with_suffix(".html").is_file()]
    assert not missing


def test_the_build_refuses_what_is_not_backed_or_not_there(tmp_path: Path) -> None:
    evidence = "../benchmarks/evidence"
    faults = {
        "It takes 3 ms.": "'3 ms' has no record",
        "It is faster.": "'faster' without a measured number",
        f'It takes [3 ms]({evidence}/x.json "measured: time").': f"no record at {evidence}/x.json",
        f'[3 ms]({evidence}/rms_norm.amd-epyc.json "measured: time; case=no")': "matches 0 measurements",
        f'[3x]({evidence}/rms_norm.amd-epyc.json "measured: highest speedup")': "'3x' is",
        f'[3 ms]({evidence}/rms_norm.stale.json "measured: lowest time")': "rms_norm.stale has changed since",
        "[a page](nowhere.md)": "nowhere.md",
        "![a picture](nowhere.png)": "nowhere.png",
    }
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "conf.py", tmp_path / "docs")
    shutil.copytree(ROOT / "docs" / "_static", tmp_path / "docs" / "_static")
    shutil.copytree(ROOT / "benchmarks" / "evidence", tmp_path / "benchmarks" / "evidence")
    recorded = (tmp_path / "benchmarks" / "evidence" / "rms_norm.amd-epyc.json").read_text()
    digest = json.loads(recorded)["sources"]["torch"]
    (tmp_path / "benchmarks" / "evidence" / "rms_norm.stale.json").write_text(recorded.replace(digest, "0" * 16))
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n" + "\n\n".join(faults), encoding="utf-8")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode == 1, done.stderr
    complaints = done.stderr.splitlines()
    for place, complaint in enumerate(faults.values()):
        assert any(f"index.md:{3 + 2 * place}: " in line and complaint in line for line in complaints), complaint
    assert len({line.partition(" ")[0] for line in complaints}) == len(faults)


def test_no_link_or_picture_is_dead(site: Path, parsed: dict[Path, Any]) -> None:
    dead = []
    for page, soup in parsed.items():
        targets = [
            (tag, tag.get("href") or tag.get("src")) for tag in soup.find_all(["a", "img", "script", "link"])
        ]
        for _, target in targets:
            url = urlparse(target or "")
            if url.scheme or url.netloc or not target:
                continue
            there = (page.parent / unquote(url.path)).resolve() if url.path else page
            if not there.is_file():
                dead.append(f"{page.relative_to(site)}: {target}")
            elif url.fragment and there in parsed and parsed[there].find(id=unquote(url.fragment)) is None:
                dead.append(f"{page.relative_to(site)}: {target} has no such place")
    assert not dead


def test_pictures_have_alternative_texts_and_measured_numbers_their_provenance(parsed: dict[Path, Any]) -> None:
    pictures = [tag for soup in parsed.values() for tag in soup.select("img, svg.plot, svg.diagram")]
    assert len(pictures) >= 10
    assert all((tag.get("alt") or tag.get("aria-label") or "").strip() for tag in pictures)
    numbers = [tag for soup in parsed.values() for tag in soup.select(".measured")]
    assert len(numbers) >= 20
    for number in numbers:
        assert "torch" in number["data-provenance"]
        assert "commit" in number["data-provenance"]
        assert "BENCHMARKS.html#" in number.a["href"]


# In a browser


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed; Debian's package is chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab that remembers what went wrong in it."""
    page = browser.new_page()
    page.wrong = []
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("response", lambda answer: page.wrong.append(answer.url) if answer.status >= 400 else None)
    left = "net::ERR_ABORTED"  # by going to another page
    page.on("requestfailed", lambda asked: page.wrong.append(asked.url) if asked.failure != left else None)
    yield page
    page.close()


# What reaches past the window; long lines of code scroll inside a box of their own. And tables that are cut off.
OVERFLOW = """
    [...document.querySelectorAll("article, article *")]
        .filter(element => element.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
        .filter(element => !element.closest(".table-wrapper *, pre *"))
        .concat([...document.querySelectorAll(".table-wrapper")].filter(box => box.scrollWidth > box.clientWidth + 1))
        .map(element => element.outerHTML.slice(0, 80))
"""


@pytest.mark.parametrize("width", [360, 1280])
def test_every_page_opens_without_an_error_and_fits_the_screen(
    width: int, site: Path, address: str, tab: Any
) -> None:
    wide = []
    tab.set_viewport_size({"width": width, "height": 740})
    for page in sorted(set(site.rglob("*.html")) - {site / "index.html"}):  # which redirects
        if "files" in page.relative_to(site).parts:
            continue
        tab.goto(f"{address}/{page.relative_to(site).as_posix()}")
        wide += [f"{page.name}: {element}" for element in tab.evaluate(OVERFLOW)[:3]]
        broken = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
        tab.wrong += tab.evaluate(broken)
    assert not tab.wrong
    assert not wide, f"these do not fit {width} pixels"


def test_the_first_page_has_a_pitch_an_install_line_code_and_a_plot(address: str, tab: Any) -> None:
    tab.goto(f"{address}/index.html")
    tab.wait_for_url("**/docs/index.html")
    article = tab.locator("article")
    assert "pip install" in article.locator("pre").first.inner_text()
    assert "kp.attention(q, k, v, mask)" in article.locator("pre").nth(1).inner_text()
    assert article.locator("svg.plot").count() == 1
    assert article.locator("table a").count() >= 8
    assert not tab.wrong


def test_an_api_entry_leads_to_its_source(address: str, tab: Any) -> None:
    tab.goto(f"{address}/docs/api/kernel_pytorch.html")
    signature = tab.locator("section#attention .signature").first
    assert "q: torch.Tensor" in signature.inner_text()
    tab.locator("section#attention a", has_text="Source").click()
    assert tab.url.endswith("files/src/kernel_pytorch/ops/attention/__init__.py.html#attention")
    line = tab.locator("#attention + span").inner_text()
    assert line.startswith(("def attention(", "@overload"))
    assert not tab.wrong


def test_the_map_leads_to_every_audiences_pages(address: str, tab: Any) -> None:
    tab.goto(f"{address}/docs/README.html")
    audiences = {"new-users": 5, "developers": 3, "hardware-engineers": 3, "performance-engineers": 2}
    for audience, least in audiences.items():
        links = tab.locator(f"section#{audience} li a")
        names = links.all_inner_texts()
        assert len(names) >= least, audience
        for place in range(len(names)):
            links.nth(place).click()
            assert tab.url != f"{address}/docs/README.html", names[place]
            assert tab.locator("article h1").first.inner_text().strip()
            tab.go_back()
    assert not tab.wrong


def test_search_finds_a_page(address: str, tab: Any) -> None:
    tab.goto(f"{address}/docs/README.html")
    tab.fill("input[name=q] >> nth=0", "sinks")
    tab.keyboard.press("Enter")
    result = tab.locator("#search-results li a", has_text="Long context on a device").first
    result.wait_for()
    result.click()
    assert "sinks" in tab.locator("article").inner_text()
    assert not tab.wrong


def test_a_measured_number_shows_where_it_comes_from(address: str, tab: Any) -> None:
    tab.goto(f"{address}/docs/performance.html")
    number = tab.locator(".measured").first
    shown = "element => getComputedStyle(element, '::after').content"
    assert "commit" not in number.evaluate(shown)
    number.hover()
    assert "NVIDIA H200" in number.evaluate(shown)
    number.locator("a").click()
    assert "BENCHMARKS.html#attention-on-nvidia-h200" in tab.url
    assert not tab.wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_plots_and_diagrams_stand_out_in_both_themes(scheme: str, address: str, tab: Any) -> None:
    tab.emulate_media(color_scheme=scheme)
    tab.goto(f"{address}/docs/performance.html")
    colours = """
        element => [getComputedStyle(element).color, getComputedStyle(document.body).backgroundColor]
            .map(colour => colour.match(/\\d+/g).slice(0, 3).map(Number).reduce((sum, part) => sum + part) / 3)
    """
    for picture in ("svg.plot", "svg.diagram"):
        ink, paper = tab.locator(picture).first.evaluate(colours)
        assert abs(ink - paper) > 120
        assert (ink > paper) == (scheme == "dark")
