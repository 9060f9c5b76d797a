"""Helpers of a kernel's caller beside other programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atom.model_ops.kernels.native.build import SOURCE_DIR, native_build

REASON = native_build().reason
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}"),
    pytest.mark.skipif(sys.platform != "linux", reason="threads are bound to processors"),
]

# Binds the caller and its helper to one processor; then the helper may use all others.
_SHARED_PROCESSOR = """
#include <cstdio>
#include <unistd.h>
#include "team.cpp"
using namespace atom;
static void bind(pid_t thread, int processor) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  sched_setaffinity(thread, sizeof one, &one);
}
int main() {
  const pid_t caller = gettid();
  const int processor = sched_getcpu();
  std::atomic<pid_t> helper{0};
  std::atomic<int> done{0};
  const auto run = [&] {
    run_tasks(64, 2, [&](TaskQueue::Hand& hand) {
      if (gettid() != caller) helper = gettid();
      for (int64_t task; hand.take(task); ++done) usleep(100);
    });
  };
  while (helper == 0) run();
  const pid_t thread = helper;
  bind(caller, processor);
  bind(thread, processor);
  const int64_t start = nanoseconds();
  cpu_set_t set;
  do {
    done = 0;
    run();
    sched_getaffinity(thread, sizeof set, &set);
  } while (CPU_ISSET(processor, &set) && nanoseconds() - start < 10'000'000'000);
  std::printf("%d tasks, shared %d, others %d", int(done), CPU_ISSET(processor, &set),
              CPU_COUNT(&set));
}
"""


def test_a_helper_leaves_its_callers_processor(tmp_path: Path) -> None:
    allowed = len(os.sched_getaffinity(0))
    if allowed < 2:
        pytest.skip("one processor")
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    (tmp_path / "team_check.cpp").write_text(_SHARED_PROCESSOR)
    command = [compiler, "-O1", "-std=c++17", "-pthread", f"-I{SOURCE_DIR}", "team_check.cpp"]
    subprocess.run([*command, "-o", "check"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "check"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"64 tasks, shared 0, others {allowed - 1}"
