"""What holds for every test: Hypothesis profiles, and the switch that allows no skip.

HYPOTHESIS_PROFILE chooses `dev` (50 examples) or `ci` (2,000); without it CI=true means `ci`.
KVFERRY_NO_SKIPS=1 turns every skip, of a test or of a whole file, into a failure that gives its
reason: a machine that is set up for all tests must not lose one silently.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)

NO_SKIPS = os.environ.get("KVFERRY_NO_SKIPS", "") not in ("", "0")
PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")

for name, examples in (("dev", 50), ("ci", 2000)):
    settings.register_profile(
        name,
        max_examples=examples,
        print_blob=True,
        # No test depends on speed, and neither does whether it passes.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(PROFILE)
# For examples that are long histories: of thousands, each would cost as much as hundreds of others.
HISTORIES = settings(max_examples=min(300, settings.default.max_examples))


def pytest_report_header() -> list[str]:
    """Say what the run was set to."""
    return [
        f"hypothesis profile: {PROFILE}",
        f"skips: {'are failures (KVFERRY_NO_SKIPS)' if NO_SKIPS else 'allowed'}",
    ]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that skips itself fails the run when skips are not allowed."""
    return _refuse_skip((yield), collector.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips fails when skips are not allowed."""
    return _refuse_skip((yield), item.nodeid)


def _refuse_skip(report: Report, name: str) -> Report:
    # An expected failure is reported as a skip too, and is none.
    if NO_SKIPS and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{name} was skipped, and KVFERRY_NO_SKIPS allows no skip: {reason}"
    return report
