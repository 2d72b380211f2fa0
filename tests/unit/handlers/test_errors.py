"""The errors of handlers, and the codes that the proxy knows."""

import handlers.errors
from handlers.errors import HandlerError
from torchmoor.wire import error_codes


def test_every_shared_code_names_an_error_of_the_handlers() -> None:
    """The proxy decides by these codes, so each must name an existing error class."""
    codes = {value for name, value in vars(error_codes).items() if name.isupper() and isinstance(value, str)}

    codes -= set(error_codes.STREAM_CODES)
    assert codes | error_codes.REFUSED_FOR_NOW == codes
    for code in codes:
        error = getattr(handlers.errors, code)
        assert issubclass(error, HandlerError)
        assert error().code == code
