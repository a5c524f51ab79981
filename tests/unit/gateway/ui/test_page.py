"""The page's files: whole, of this origin alone, nothing inline, and the library as it was published."""

import hashlib
import re

from triptych_gateway.ui.live_view import PAGE, PAGE_HEADERS, read_page_files

LIBRARY = "htm-preact-3.1.1.js"
LIBRARY_SHA256 = "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"
FILES = read_page_files()
OWN = {name: file.content.decode() for name, file in FILES.items() if not name.startswith("htm-preact")}


def test_the_library_is_the_published_one_with_its_licences() -> None:
    assert hashlib.sha256(FILES[LIBRARY].content).hexdigest() == LIBRARY_SHA256
    licences = FILES["htm-preact-3.1.1.LICENSE.txt"].content.decode()
    assert "Apache License" in licences
    assert "The MIT License" in licences


def test_everything_that_is_named_is_there() -> None:
    named = re.findall(r'(?:href|src)="ui/([^"]+)"', OWN[PAGE])
    assert {"app.js", "style.css", "icon.svg"} == set(named)
    for name, text in OWN.items():
        if name.endswith(".js"):
            assert set(re.findall(r'from "\./([^"]+)"', text)) <= FILES.keys(), name


def test_nothing_is_inline_and_nothing_of_another_origin() -> None:
    page = OWN[PAGE]
    assert not re.search(r"<style|\son\w+=|\sstyle=", page)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    for name, text in OWN.items():
        others = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not others, name
        assert not re.search(r"innerHTML|\beval\(|localStorage|document\.cookie", text), name


def test_the_policy_allows_files_of_the_gateway_alone() -> None:
    policy = PAGE_HEADERS["Content-Security-Policy"]
    directives = {each.split()[0]: each.split()[1:] for each in policy.split(";")}
    assert directives["default-src"] == ["'none'"]
    for kind in ("script-src", "style-src", "connect-src"):
        assert directives[kind] == ["'self'"], kind
    assert "unsafe" not in policy
