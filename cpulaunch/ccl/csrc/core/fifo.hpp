// A queue that keeps its memory, unlike std::deque: filling and emptying it again allocates nothing.

#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace cpulaunch {

template <class T>
class Fifo {
 public:
  bool empty() const { return first_ == items_.size(); }
  size_t size() const { return items_.size() - first_; }
  T& front() { return items_[first_]; }
  T& operator[](size_t index) { return items_[first_ + index]; }
  T* begin() { return items_.data() + first_; }
  T* end() { return items_.data() + items_.size(); }

  // Before it grows, the queue reuses the space of items that have left, if these are at least half of all.  So each
  // item is moved about once.
  void push_back(T item) {
    if (first_ > 0 && first_ >= size() && items_.size() == items_.capacity()) {
      items_.erase(items_.begin(), items_.begin() + first_);
      first_ = 0;
    }
    items_.push_back(std::move(item));
  }
  void pop_front() {
    items_[first_++] = T();
    if (empty()) clear();
  }
  void clear() {
    items_.clear();
    first_ = 0;
  }

 private:
  std::vector<T> items_;
  size_t first_ = 0;
};

}  // namespace cpulaunch
