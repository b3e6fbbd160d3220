// Detects forked processes.  A forked process has copies of this one's groups, but not their threads, and must not take
// part in their collectives.

#pragma once

#include <pthread.h>

#include <atomic>

namespace cpulaunch {

namespace forked {

inline std::atomic<bool> here{false};
inline const int registered = pthread_atfork(nullptr, nullptr, [] { here.store(true, std::memory_order_relaxed); });

}  // namespace forked

// Whether this process was forked from one that had loaded this library.
inline bool is_forked() { return forked::here.load(std::memory_order_relaxed); }

}  // namespace cpulaunch
