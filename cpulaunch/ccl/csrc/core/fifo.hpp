// A queue that keeps its memory, unlike std::deque: filling and emptying it again allocates nothing.

#pragma once

#include <algorithm>
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
  T& back() { return items_.back(); }
  T& operator[](size_t index) { return items_[first_ + index]; }
  T* begin() { return items_.data() + first_; }
  T* end() { return items_.data() + items_.size(); }
  const T* begin() const { return items_.data() + first_; }
  const T* end() const { return items_.data() + items_.size(); }

  // The queue has room for a few items from the start, because how many there are at a time may depend on the speed of
  // other ranks.  Before it grows, it reuses the space of items that have left, if these are at least half of all.  So
  // each item is moved about once.
  void push_back(T item) {
    if (items_.capacity() == 0) items_.reserve(kRoom);
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
  // Removes an item between others; pop_front() is faster for the first one.
  void erase(T* item) {
    std::move_backward(begin(), item, item + 1);
    pop_front();
  }
  void clear() {
    items_.clear();
    first_ = 0;
  }

 private:
  static constexpr size_t kRoom = 16;

  std::vector<T> items_;
  size_t first_ = 0;
};

}  // namespace cpulaunch
