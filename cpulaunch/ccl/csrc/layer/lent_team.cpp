#include "lent_team.hpp"

#include <ATen/Parallel.h>

#include <algorithm>

// These functions are resolved as torch resolves them: in the OpenMP library that torch is linked with, or in one that
// is loaded in its place.  A library linked with this one would have threads of its own.
extern "C" {
#define CPULAUNCH_OPENMP __attribute__((weak, visibility("default")))
CPULAUNCH_OPENMP void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
CPULAUNCH_OPENMP int omp_get_thread_num();
CPULAUNCH_OPENMP int omp_get_num_threads();
}

namespace cpulaunch {

namespace {

struct Division {
  int32_t count;
  void (*run)(void* argument, int32_t index);
  void* argument;
};

// Starts all threads of the team, even if there are fewer parts: OpenMP would end the threads that a smaller team
// doesn't need.
void run_parts(const cl_team*, int32_t count, void (*run)(void*, int32_t), void* argument) {
  Division parts{count, run, argument};
  const auto work = [](void* data) {
    const auto& its = *static_cast<Division*>(data);
    for (int32_t i = omp_get_thread_num(); i < its.count; i += omp_get_num_threads()) its.run(its.argument, i);
  };
  GOMP_parallel(work, &parts, /*threads=*/0, /*flags=*/0);
}

int threads_to_lend(int most) {
  const bool has_openmp = AT_PARALLEL_OPENMP && GOMP_parallel && omp_get_thread_num && omp_get_num_threads;
  return has_openmp && !at::in_parallel_region() ? std::min(most, at::get_num_threads()) : 1;
}

}  // namespace

LentTeam::LentTeam(int most)
    : team_{threads_to_lend(most), run_parts}, before_(cl_lend_team(team_.size > 1 ? &team_ : nullptr)) {}

LentTeam::LentTeam(const cl_team* team) : team_{}, before_(cl_lend_team(team)) {}

LentTeam::~LentTeam() { cl_lend_team(before_); }

}  // namespace cpulaunch
