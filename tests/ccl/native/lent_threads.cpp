#include "lent_threads.hpp"

namespace cpulaunch {

LentThreads::LentThreads(int count)
    : cl_team{count, [](const cl_team* self, int32_t parts, void (*part)(void*, int32_t), void* argument) {
                auto& all = *const_cast<LentThreads*>(static_cast<const LentThreads*>(self));
                all.run_all([&](int thread) {
                  for (int32_t i = thread; i < parts; i += all.size) part(argument, i);
                });
              }} {
  for (int thread = 1; thread < count; ++thread) threads_.emplace_back([this, thread] { work(thread); });
  lend_team(this);
}

LentThreads::~LentThreads() {
  lend_team(nullptr);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

std::vector<Moved> LentThreads::moved() {
  std::vector<Moved> moved(size);
  run_all([&](int thread) { moved[thread] = moved_by_this_thread(); });
  moved[0].copied -= before_.copied;
  moved[0].summed -= before_.summed;
  return moved;
}

void LentThreads::run_all(const Act& act) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    act_ = &act;
    ++turn_;
    working_ = size - 1;
  }
  changed_.notify_all();
  act(0);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return working_ == 0; });
}

void LentThreads::work(int thread) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (int turn = 1;; ++turn) {
    changed_.wait(lock, [&] { return ends_ || turn_ == turn; });
    if (ends_) return;
    const Act& act = *act_;
    lock.unlock();
    act(thread);
    lock.lock();
    --working_;
    changed_.notify_all();
  }
}

}  // namespace cpulaunch
