#include "details.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <thread>

#include "meeting.hpp"
#include "operations.hpp"
#include "pace.hpp"
#include "plain_numbers.hpp"
#include "point_to_point.hpp"
#include "pool.hpp"
#include "shared_file.hpp"

namespace cpulaunch {

namespace {

using namespace std::chrono_literals;

// An operation of two pieces, of which the first one waits longer.
class Counting final : public Operation {
 public:
  Counting() : Operation({Kind::barrier}, 1) {}

  uint64_t pieces() const override { return 2; }
  bool exchange(Piece piece) override {
    ++exchanged[piece];
    return piece == 1 || exchanged[0] == 10;
  }

  int exchanged[2] = {};
};

// Calls `act` in two ranks of one host, with the rank's number.
template <class Act>
void run_two(const Act& act) {
  Meeting meeting({0, 0}, 1);
  std::exception_ptr failure;
  std::thread second([&] {
    const auto own = meeting.join(1);
    try {
      act(1, *own);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  const auto own = meeting.join(0);
  try {
    act(0, *own);
  } catch (...) {
    failure = std::current_exception();
  }
  second.join();
  if (failure) std::rethrow_exception(failure);
}

void wait_for(Transfer& transfer) {
  const auto until = std::chrono::steady_clock::now() + 10s;
  while (!transfer.test()) {
    expect(std::chrono::steady_clock::now() < until, "it takes too long");
    std::this_thread::yield();
  }
}

}  // namespace

// A piece that is done isn't polled again while an earlier one waits.
void check_exchanged_once() {
  const auto own = std::make_shared<Hierarchy>(Layout({0}, 0), nullptr, nullptr);
  const auto operation = std::make_shared<Counting>();
  const auto transfer = own->start({operation});
  while (!transfer->test()) {
  }
  expect(operation->exchanged[0] == 10, "the first piece is not looked after");
  expect(operation->exchanged[1] == 1, "the second piece is exchanged again");
}

void check_other_sizes() {
  run_two([](int rank, Hierarchy& own) {
    std::vector<char> input(8), first(8), second(8);
    const size_t mine = rank == 0 ? 4 : 8;
    const Parts outputs{{first.data(), mine}, {second.data(), 12 - mine}};
    const auto transfer = own.start({make_all_gather(own, input.data(), outputs)});
    try {
      wait_for(*transfer);
    } catch (const Mismatch& mismatch) {
      expect(std::strstr(mismatch.what(), "all_gather of 12 bytes in parts of other sizes"), mismatch.what());
      return;
    }
    throw std::runtime_error("other sizes are not seen");
  });
}

// A group that starts no further operations doesn't keep its peers' memory.
void check_freed_blocks() {
  constexpr size_t kSize = 8 << 20;
  const std::vector<char> numbers(kSize, 1);
  char* memory = SharedBlocks::copy(numbers.data(), kSize);
  const auto place = SharedBlocks::find(memory, kSize);
  MappedBlocks mapped;
  const char* other = mapped.at(getpid(), place, kSize);
  expect(other[kSize - 1] == 1, "it is not mapped");
  const int file = fcntl(place.descriptor, F_DUPFD_CLOEXEC, 0);
  SharedBlocks::free(memory);
  struct stat status {};
  fstat(file, &status);
  close(file);
  expect(status.st_blocks * 512 <= 64 << 10, "the memory is kept");
  mapped.drop_freed();
}

namespace {

uint32_t number_of(const char* memory) { return SharedBlocks::find(memory, 1).block; }

}  // namespace

// Freed blocks are taken again, and no more are kept than were in use at one time.
void check_spare_blocks() {
  constexpr size_t kSize = 3 << 20;
  char* first = SharedBlocks::take(kSize);
  char* second = SharedBlocks::take(kSize);
  const auto numbers = std::set<uint32_t>{number_of(first), number_of(second)};
  const int file = fcntl(SharedBlocks::find(first, kSize).descriptor, F_DUPFD_CLOEXEC, 0);
  SharedBlocks::free(first);
  SharedBlocks::free(second);
  expect(!SharedBlocks::find(first, kSize), "a tensor that was freed is shared");
  first = SharedBlocks::take(kSize - (1 << 20));
  second = SharedBlocks::take(kSize);
  expect(numbers == std::set<uint32_t>{number_of(first), number_of(second)}, "they are not taken again");
  SharedBlocks::free(first);
  SharedBlocks::free(second);
  char* large = SharedBlocks::take(4 * kSize);  // larger than both together
  struct stat status {};
  fstat(file, &status);
  close(file);
  expect(status.st_blocks * 512 <= 64 << 10, "more is kept than was taken at one time");
  char* small = SharedBlocks::take(kSize);
  expect(numbers.count(number_of(small)) == 0, "it is kept");
  const int last = fcntl(SharedBlocks::find(large, 1).descriptor, F_DUPFD_CLOEXEC, 0);
  SharedBlocks::free(small);
  SharedBlocks::free(large);
  SharedBlocks::drop_spares();
  fstat(last, &status);
  close(last);
  expect(status.st_blocks * 512 <= 64 << 10, "what is kept is not given back");
}

void check_forked_tensors() {
  const std::vector<char> numbers(10'000, 1);
  char* memory = SharedBlocks::copy(numbers.data(), numbers.size());
  const pid_t child = fork();
  if (child == 0) {
    const bool sees_it = memory[5000] == 1;
    memory[5000] = 2;
    char* another = SharedBlocks::copy(numbers.data(), numbers.size());  // the lock must be free here
    SharedBlocks::free(another);
    SharedBlocks::free(memory);
    _exit(sees_it ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(status == 0, "the child does not see the tensor");
  expect(memory[5000] == 1, "the child has changed the tensor");
  SharedBlocks::free(memory);
}

void check_subnormal_sums() {
  run_two([](int, Hierarchy& own) {
    const float small = std::numeric_limits<float>::denorm_min() * 100;
    const auto before = float_mode();
    set_float_mode(before | kFlushing);
    std::vector<float> numbers(1000, small);
    Signature signature{Kind::all_reduce, NumberType::float32, Reduction::sum, Wire::exact, -1, 4000};
    const auto transfer = own.start({make_all_reduce(own, reinterpret_cast<char*>(numbers.data()), signature)});
    wait_for(*transfer);
    const bool kept = float_mode() == (before | kFlushing);
    set_float_mode(before);
    expect(kept, "the mode of the caller's thread is changed");
    for (const float number : numbers) expect(number == 2 * small, "a sum is flushed to zero");
  });
}

// A message whose announced size is larger than any memory, although it claims to be small.
void check_endless_message() {
  const Layout layout({0, 0}, 0);
  const SharedSlots::Shape shape(layout);
  const int descriptor = SharedSlots::offer(2, shape);
  const auto slots = SharedSlots::map({getpid(), descriptor}, 2, shape);
  close(descriptor);
  const auto messages = std::make_shared<PointToPoint>(layout, slots, nullptr);
  char data[8];
  const auto transfer = messages->receive(1, 7, data, sizeof(data));
  struct {
    uint32_t kind = 0;
    int32_t tag = 7;
    uint64_t bytes = uint64_t{1} << 60, id = 0, address = 0;
  } frame;
  auto& ring = slots->ring(1, 0);
  std::memcpy(ring.data, &frame, sizeof(frame));
  ring.written.store(sizeof(frame));
  expect(!transfer->test(), "it is done");
  expect(transfer->lost().text().find("makes no sense") != std::string::npos, "it is not seen");
}

void check_seals() {
  const int file = create_shared_file(8192);
  expect(file >= 0, "no memory");
  expect(ftruncate(file, 4096) != 0, "the memory can be made smaller");
  close(file);
}

// How many pages of a rank's first slot are in memory.
size_t resident_pages(const Hierarchy& hierarchy) {
  const size_t page = getpagesize(), bytes = hierarchy.shape.slot_size;
  std::vector<unsigned char> pages(bytes / page);
  expect(mincore(hierarchy.slots().slot(hierarchy.layout.local, 0), bytes, pages.data()) == 0, "no pages");
  return std::count_if(pages.begin(), pages.end(), [](unsigned char each) { return each & 1; });
}

// The memory of a group's slots goes back to the system once the group is idle, and is allocated again when needed.
void check_idle_memory() {
  run_two([](int rank, Hierarchy& own) {
    const auto sum = [&] {
      std::vector<float> numbers(1 << 20, static_cast<float>(1 + rank));
      Signature signature{Kind::all_reduce};
      signature.type = NumberType::float32;
      signature.bytes = numbers.size() * sizeof(float);
      wait_for(*own.start({make_all_reduce(own, reinterpret_cast<char*>(numbers.data()), signature)}));
      for (const float each : numbers) expect(each == 3, "a wrong sum");
    };
    for (int round = 0; round < 2; ++round) {
      sum();
      expect(resident_pages(own) > 0, "nothing went through the slots");
      expect(own.give_back(IdleMemory::now()) == 0, "a group that was just used gives its memory back");
      const auto until = std::chrono::steady_clock::now() + 10s;
      while (own.give_back(IdleMemory::now() + IdleMemory::kAfter + 1s) == 0) {  // the other rank may not be done
        expect(std::chrono::steady_clock::now() < until, "nothing is given back");
      }
      expect(resident_pages(own) == 0, "pages stay");
      expect(own.give_back(IdleMemory::now() + 2 * IdleMemory::kAfter) == 0, "it is given back twice");
    }
  });
}

// Threads take and give blocks at once.  None gets a block that another one has.
void check_pool() {
  std::atomic<bool> shared{false};
  std::vector<std::thread> threads;
  for (char number = 1; number <= 4; ++number) {
    threads.emplace_back([&, number] {
      for (int i = 0; i < 20'000; ++i) {
        std::array<PooledVector<char>, 4> blocks;
        for (auto& each : blocks) each.assign(4000, number);
        for (auto& each : blocks) {
          if (std::count(each.begin(), each.end(), number) != 4000) shared = true;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  expect(!shared, "two threads have the same block");
}

void check_pace() {
  const auto none = 0ns;
  const Pace own{}, shared{false, true}, crowded{true, false};
  // Peers on other hosts are polled like those on this host; only simulated hosts need this rank's cores.
  expect(rest_of_poller(own, 500, none) == Rest::spin, "it doesn't spin");
  expect(rest_of_poller(own, 5000, none) == Rest::yield, "it doesn't yield");
  expect(rest_of_poller(own, 20000, none) == Rest::nap, "it doesn't nap");
  expect(rest_of_poller(shared, 500, none) == Rest::yield, "it keeps a shared core");
  expect(rest_of_poller(shared, 500, 1ms) == Rest::nap, "it yields for ever");
  expect(rest_of_poller(crowded, 0, none) == Rest::yield, "it keeps a crowded core");
  // On its own core, the background thread doesn't sleep while the peer is at work.
  expect(rest_in_background(own, true, true, 500, none) == Rest::spin, "it leaves its own core");
  expect(rest_in_background(own, false, true, 99, none) == Rest::spin, "it doesn't wait for the next piece");
  expect(rest_in_background(own, false, true, 100, none) == Rest::nap, "it takes the computation's core");
  expect(rest_in_background(own, false, true, 150, none) == Rest::long_nap, "it takes the computation's core for long");
  expect(rest_in_background(own, true, false, 0, none) == Rest::long_nap, "it polls beside a caller");
}

}  // namespace cpulaunch
