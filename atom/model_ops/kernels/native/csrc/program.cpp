// A recorded program: kernels with their arguments, run one after another in one call.
#include "parallel.h"

namespace atom {
namespace {

struct Step {
  int64_t (*kernel)(const void* args);
  const void* args;
};

struct ProgramArgs {
  const Step* steps;  // [count]
  int64_t* failed;    // the step that returned other than 0
  int64_t count, threads;
};

// 0, or what the first failing step returned; the rest is not run.
int64_t run_program(const ProgramArgs& a) {
  const int64_t before = program_threads;
  program_threads = a.threads;
  int64_t wrong = 0;
  for (int64_t i = 0; i < a.count && wrong == 0; ++i) {
    wrong = a.steps[i].kernel(a.steps[i].args);
    *a.failed = i;
  }
  program_threads = before;
  return wrong;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_run_program(const atom::ProgramArgs* args) {
  return atom::run_program(*args);
}
