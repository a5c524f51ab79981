"""Files of the page. They hold no data: any client that reaches the gateway may read them."""

from dataclasses import dataclass
from importlib.resources import files

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
PAGE = "page.html"
# Scripts and styles of our own files alone; nothing is loaded from, or sent to, another origin.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
        " trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page, as sent."""

    content: bytes
    media_type: str


def read_page_files() -> dict[str, PageFile]:
    """Read all files of the page, by name."""
    folder = files(__package__).joinpath("static")
    return {
        each.name: PageFile(each.read_bytes(), _TYPES[suffix])
        for each in folder.iterdir()
        if (suffix := "." + each.name.rpartition(".")[2]) in _TYPES
    }
