"""The two roles as users start them, over verbs: `blink-runtime serve-gpu` and `serve-dpu`.

A real model (a tiny one) on the CPU target, CPython and all, over Soft-RoCE inside a virtual
machine. guest_python.py says how they come there.
"""

from __future__ import annotations

import json
import shlex

import pytest

from blinkc.bundle.write_bundle import BundleConfig, write_bundle
from blinkc.capture.plan_capture import CaptureConfig
from blinkc.config import CompileConfig
from blinkc.pipeline import compile_model
from blinkc.progress import Progress
from tests.bundle.tiny_model import write_tiny_model

from .guest import Guest, require_guests, run_guests
from .guest_python import ASKED, ROLE, Roles, pack_roles
from .test_guests import SHELL, check

pytestmark = pytest.mark.rdma

SCRIPT = """
role() {
  local name=$1
  shift
  %(python)s -c "$ROLE" "$@" >/tmp/$name 2>&1 &
}

has_said() {
  grep -qs "$2" /tmp/$1 || {
    kill -0 $3 2>/dev/null || fail "$1 has ended: $(cat /tmp/$1)"
    false
  }
}

start_gpu() {
  role gpu serve-gpu /t/bundle --listen $SELF:7471 --threads 1
  GPU=$!
  repeat 120 has_said gpu 'ready after' $GPU
  cat /tmp/gpu
}

start_dpu() {
  role dpu serve-dpu /t/slim --connect $SELF:7471 --listen 127.0.0.1:8000
  DPU=$!
  repeat 120 has_said dpu http:// $DPU
  cat /tmp/dpu
}

ask_model() {
  repeat 60 wget -q -O /tmp/answer --header 'Content-Type: application/json' \\
    --post-data "$ASKED" $URL/v1/chat/completions
  cat /tmp/answer
  grep -qF "$ANSWER" /tmp/answer || fail "not the answer that the model gives outside"
  say answered
}

start_gpu
start_dpu
expect_serving
ask_model
echo "== the owner is killed and comes back"
kill -9 $GPU
expect_unhealthy
start_gpu
expect_serving
ask_model
repeat 60 has_said gpu 'front end 0 connected' $GPU
kill $DPU $GPU
wait $DPU || fail "serve-dpu ends with $?: $(cat /tmp/dpu)"
wait $GPU || fail "serve-gpu ends with $?: $(cat /tmp/gpu)"
say all is well
"""


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Roles:
    require_guests()
    folder = tmp_path_factory.mktemp("roles")
    model = write_tiny_model(folder / "tiny-llama")
    capture = CaptureConfig(max_batch=2, max_seqlen=96, max_prefill_tokens=32, num_slots=4)
    compile_model(CompileConfig(model=str(model), capture=capture), folder / "build")
    bundle = folder / "bundle"
    write_bundle(BundleConfig(build=folder / "build", output=bundle), Progress(quiet=True))
    return pack_roles(bundle, folder)


def test_roles_over_verbs(roles: Roles) -> None:
    """serve-gpu and serve-dpu in one guest; the owner dies and comes back."""
    variables = {
        **roles.environment,
        "ROLE": ROLE,
        "ASKED": json.dumps(ASKED),
        "ANSWER": roles.answer,
    }
    exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in variables.items())
    script = exports + SHELL + SCRIPT % {"python": shlex.quote(roles.python)}
    (outcome,) = run_guests(Guest(script=script, files=roles.files))
    print(outcome.output)
    check(outcome, "over rxe0 port 1 gid", "golden prompt gives its", "all is well")
