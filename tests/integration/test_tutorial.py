"""The code that the tutorial prints is a domain that passes its check."""

import re
import types
from pathlib import Path

import pytest

from headrace.environments.check import check_domain
from headrace.environments.protocol import Domain

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorial.md"


@pytest.fixture(scope="module")
def domain() -> Domain:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("dates")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    made: Domain = module.__dict__["Dates"]()
    return made


@pytest.mark.jail
async def test_the_domain_of_the_tutorial_judges_as_it_should(domain: Domain) -> None:
    report = await check_domain(domain, level=1, tasks=2)
    assert report.problems == []
    assert report.oracle == 2
