"""Two hosts, or the reason why there are none here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.hosts.rig import Host, Hosts, NoHosts


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(Hosts())
        except NoHosts as reason:
            pytest.skip(f"no network namespaces: {reason}")
        yield found
