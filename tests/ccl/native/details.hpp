// Checks of single parts of the core.  Each throws std::runtime_error if something is wrong.

#pragma once

namespace cpulaunch {

void check_exchanged_once();
void check_other_sizes();
void check_freed_blocks();
void check_spare_blocks();
void check_forked_tensors();
void check_subnormal_sums();
void check_endless_message();
void check_seals();
void check_crowd(const char* from);
void check_proofs();
void check_idle_memory();
void check_pace();
void check_sources();

}  // namespace cpulaunch
