"""Operations that name ids: which instance gets them."""

from collections.abc import Callable

from torchmoor.proxy.dispatch.id_operations import IdOperations
from torchmoor.proxy.instances.instance import Instance

PATH = b"/predictions/llava"


class Running:
    """Subrequests that run until the test ends them."""

    def __init__(self) -> None:
        self.sent: list[tuple[Instance, bytes]] = []
        self.ends: list[Callable[[], None]] = []

    def send(self, target: Instance, data: bytes, on_over: Callable[[], None]) -> None:
        self.sent.append((target, data.partition(b"\r\n\r\n")[2]))
        self.ends.append(on_over)


def test_ids_of_an_instance_that_was_replaced_do_not_hold_up_those_of_its_replacement() -> None:
    """Each gets its own ids, although both have one name: those of the new one would go to the old one's address."""
    old, new = (Instance(name="a", endpoint="llava", model="llava", port=port) for port in (8080, 8090))
    running = Running()
    operations = IdOperations(running, "cancel", "ids")

    operations.send(old, PATH, "1")
    operations.send(old, PATH, "2")
    operations.send(new, PATH, "3")
    operations.send(new, PATH, "4")
    for end in list(running.ends):
        end()

    assert running.sent == [
        (old, b'{"ids": ["1"]}'),
        (new, b'{"ids": ["3"]}'),
        (old, b'{"ids": ["2"]}'),
        (new, b'{"ids": ["4"]}'),
    ]
