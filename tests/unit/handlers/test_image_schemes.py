"""Schemes of images' addresses: one list for the dialects, the fetch pool and the loader."""

import pytest

from handlers.chat.images.schemes import DATA, HTTP, S3, find_scheme, is_address, is_fetched


@pytest.mark.parametrize("scheme", [*sorted(HTTP), S3])
def test_fetched_schemes(scheme: str) -> None:
    """An address of such a scheme is accepted and fetched, whatever its case."""
    for address in (f"{scheme}://there/a.png", f"{scheme.upper()}://there/a.png"):
        assert (find_scheme(address), is_address(address), is_fetched(address)) == (scheme, True, True)
    assert is_fetched(f" {scheme}://there/a.png")


def test_data_url_is_not_fetched() -> None:
    """A data URL counts as an address, but its bytes come with the request, so it is not fetched."""
    url = "data:image/png;base64,AAAA"

    assert (find_scheme(url), is_address(url), is_fetched(url)) == (DATA, True, False)


@pytest.mark.parametrize("text", ["", "iVBORw0KGgo=", "://a", "1:2", " "])
def test_text_without_a_scheme(text: str) -> None:
    """Text without a scheme is treated as base64."""
    assert (find_scheme(text), is_address(text), is_fetched(text)) == ("", False, False)


def test_other_schemes_and_bytes() -> None:
    """Any other scheme is recognised, so that an error can name it; bytes are an image."""
    assert (find_scheme("FTP://a/b"), is_address("ftp://a/b"), is_fetched("ftp://a/b")) == ("ftp", False, False)
    assert not is_fetched(b"http://a/b")
