"""The name of an uploaded file, which TorchServe does not pass on, in the beginning of its form."""

import pytest

from torchmoor.proxy.api.openai_resources import filename_line

PURPOSE = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('name="file"; filename="c.png"', "c.png"),
        ("name=file; filename=c.png", "c.png"),
        ('name="file"; filename="Größe 日;.png"', "Gr%C3%B6%C3%9Fe%20%E6%97%A5%3B.png"),
        ('name="file"; filename="a%22b.png"', "a%22b.png"),
        ('filename="c.png"; name="file"', "c.png"),
        ('name="file"; filename="x.png"; filename*=utf-8\'\'%C3%BC.png', "%C3%BC.png"),
        (r'name="file"; filename="a\"b.png"', "a%22b.png"),
        (r'name="file"; filename="C:\\photos\\c.png"', "c.png"),
        ('name="file"; filename="../../etc/c.png"', "c.png"),
        ('name="file"; filename="a\tb.png"', "a%09b.png"),
        (f'name="file"; filename="{"é" * 300}.png"', "%C3%A9" * 127),
    ],
)
def test_names_are_read_without_their_path(disposition: str, name: str) -> None:
    """Names are read without their path, percent-encoded, and shortened to TorchServe's limit on headers."""
    form = PURPOSE + f"--B\r\nContent-Disposition: form-data; {disposition}\r\n\r\nx\r\n--B--\r\n".encode()

    assert filename_line(form) == f"x-torchmoor-form-filename: {name}\r\n".encode()


@pytest.mark.parametrize(
    "disposition",
    ['name="file"', 'name="file"; filename=""', 'name="file"; filename="folder/"', 'name="mask"; filename="c.png"'],
)
def test_a_form_without_a_name_has_no_line(disposition: str) -> None:
    assert filename_line(PURPOSE + f"--B\r\nContent-Disposition: form-data; {disposition}\r\n\r\nx".encode()) == b""


@pytest.mark.parametrize("end", [b"", b'"'])
def test_an_endless_name_is_none(end: bytes) -> None:
    """A name without an end is ignored, and only the form's beginning is read."""
    assert filename_line(b'content-disposition: form-data; name="file"; filename="' + b"a" * 8_000_000 + end) == b""
