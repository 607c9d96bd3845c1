from dataclasses import fields

from shardwise.plan.hardware.host import Host, usual_host


def test_every_figure_has_a_source() -> None:
    for known in fields(Host):
        figure = getattr(usual_host(), known.name)
        assert 0 < figure.value < 1e-3
        assert figure.source
        assert figure.note
