// Checks of single parts of the core.  Each throws std::runtime_error if something is wrong.

#pragma once

#include <stdexcept>

namespace cpulaunch {

inline void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

void check_exchanged_once();
void check_other_sizes();
void check_freed_blocks();
void check_spare_blocks();
void check_forked_tensors();
void check_subnormal_sums();
void check_endless_message();
void check_seals();
void check_idle_memory();
void check_pace();
void check_pool();

// In connections.cpp.
void check_crowd(const char* from);
void check_proofs();
void check_sources();
void check_one_connection();
void check_separate_connections();
void check_two_connections();
void check_who_has_left();
void check_stranger_at_address();
void check_last_data();
void check_data_before_hello();
void check_late_reader();
void check_reader_says_hello();
void check_short_outage();
void check_asked_root();

}  // namespace cpulaunch
