from scale import library

from aotops.testing import check


def test_scale():
    report = check(library.ops["scale"])
    assert report.ok, report.render()
