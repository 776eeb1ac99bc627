"""Real verbs, without a card: the transport and a whole request over Soft-RoCE in small machines.

What a guest prints is in the assertion's message. README.md beside this file says how they boot.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime_frontend.native_build import build_program

from .guest import Guest, Outcome, require_guests, run_guests

pytestmark = pytest.mark.rdma

SHELL = Path(__file__).with_name("guest_shell.sh").read_text()


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    require_guests()
    names = ("transport_conformance", "link_owner", "link_front_end")
    return {name: build_program(name, sanitize="") for name in names}


def check(outcome: Outcome, *phrases: str) -> None:
    assert outcome.status == 0, outcome.output
    for phrase in phrases:
        assert phrase in outcome.output, f"{phrase!r} is not in\n{outcome.output}"


def test_transport_conforms_over_verbs(programs: dict[str, Path]) -> None:
    script = """
export BLINK_NEEDS_VERBS=1
for name in info_names_the_ring bytes_arrive_both_ways_at_any_alignment \\
  source_may_be_reused_at_once outside_the_ring_nothing_is_transferred \\
  closed_transport_says_so an_ordered_read_waits_for_those_without_order \\
  payload_is_visible_with_its_word; do
  ./transport_conformance $name || exit 1
done
"""  # the others are about memory, not about the link
    (outcome,) = run_guests(Guest(script=script, programs=programs))
    check(outcome, "verbs: rxe0 port 1 gid", "payload_is_visible_with_its_word\n")
    assert outcome.output.count("1 tests passed") == 7, outcome.output


def test_requests_and_deaths_in_one_guest(programs: dict[str, Path]) -> None:
    """Two processes and a ring between them; then each is killed in turn and comes back."""
    script = (
        SHELL
        + """
start_owner --token-interval-us=2000 --bundle-id=5
start_front_end --bundle-id=5
expect_serving
ask hello
refused --bundle-id=7 'front end has bundle'
refused --front-end=2 'indices start at 0'
refused --front-end=0 'still connected'

echo "== the owner is killed and restarted"
hang &
sleep 1
kill -9 $OWNER
expect_unhealthy
start_owner --token-interval-us=2000 --bundle-id=5
expect_serving
for i in 1 2 3 4 5 6; do ask "after the owner's death $i"; done

echo "== the front end is killed with requests in flight and restarted"
for i in 1 2 3; do hang & done
sleep 1
kill -9 $FRONT_END
start_front_end --bundle-id=5
expect_serving
for i in 1 2 3 4 5 6; do ask "second life $i"; done
kill -0 $OWNER
echo all is well
"""
    )
    (outcome,) = run_guests(Guest(script=script, programs=programs))
    check(outcome, "all is well")


def test_lossy_link_that_breaks_and_comes_back(programs: dict[str, Path]) -> None:
    """Two guests, 1 % of the packets lost each way; then the interface goes down and up."""
    owner = (
        SHELL
        + """
start_owner --token-interval-us=2000 --bundle-id=5
wait_for_the_other
kill -0 $OWNER
"""
    )
    front_end = (
        SHELL
        + """
start_front_end --bundle-id=5 --transfer-timeout-ms=3000
expect_serving
for i in 1 2 3; do ask "over a lossy link $i"; done
echo "== the link goes down"
hang &
sleep 1
ip link set $LINK down
expect_unhealthy
ip link set $LINK up
expect_serving
for i in 1 2 3 4 5 6; do ask "the link is back $i"; done
echo all is well
"""
    )
    outcomes = run_guests(
        Guest(script=owner, programs=programs, loss_percent=1, has_peer=True, number=1),
        Guest(script=front_end, programs=programs, loss_percent=1, has_peer=True, number=2),
    )
    check(outcomes[1], "all is well")
    check(outcomes[0])
