"""Connections of a listener that stops."""

from tests.fuzz.connections import LOOP, Stage, turn


def test_a_connection_that_comes_just_before_the_stop_does_not_hold_it_up() -> None:
    """The listener is closed before the connection is reported, so nothing else would end it."""

    async def run() -> None:
        stage = LOOP.stage = Stage()
        server = stage.proxy.data.server
        await server.stop(grace_s=0)
        stage.take_client()
        await turn()

        assert not server.connections
        stage.check_clean()

    LOOP.run_until_complete(run())
