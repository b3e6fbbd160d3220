#include "rank.hpp"

#include <sched.h>

#include <cstring>
#include <stdexcept>

namespace cpulaunch {

namespace {

// Each tensor of a rank has different numbers.
Source of_tensor(Source source, int tensor) {
  source.seed += 31 * tensor;
  return source;
}

// Without numbers there is no memory, but the other rank must still learn that none will come.
Part part(Numbers& numbers) {
  static char nothing;
  return {numbers.bytes() ? numbers.data() : &nothing, numbers.bytes()};
}

}  // namespace

Call Call::any(std::mt19937_64& random, int ranks) {
  static constexpr size_t kLongest[] = {8, 200, 10'000, 300'000, 3'000'000};  // bytes
  Call call{kKinds[random() % std::size(kKinds)], {random() % 100'000, kTypes[random() % std::size(kTypes)]}, 0};
  call.source.reduction = kReductions[random() % std::size(kReductions)];
  if (!reduce_for(call.source.type, call.source.reduction)) call.source.reduction = Reduction::sum;
  if (random() % 3 == 0) {
    call.wire = Wire::bfloat16;
    if (random() % 4) call.source.type = NumberType::float32, call.source.reduction = kReductions[random() % 2];
  }
  const size_t longest = kLongest[random() % std::size(kLongest)] / size_of(call.source.type);
  call.count = random() % 10 ? 1 + random() % longest : 0;
  const bool has_tensors = call.kind != Kind::all_reduce && !has_root(call.kind);
  if (has_tensors) call.count = (call.count + ranks - 1) / ranks;
  call.uneven = random() % 2;
  call.in_place = random() % 2;
  call.root = static_cast<int>(random() % ranks);
  if (call.kind == Kind::all_to_all && random() % 3) call.root = -1;
  return call;
}

void Running::wait(std::chrono::milliseconds limit) const {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (!test()) {
    sched_yield();
    check_peers();
    if (std::chrono::steady_clock::now() < until) continue;
    throw std::runtime_error(name_ + " is not done, waits for rank " + transfer_->stragglers());
  }
}

void Running::check_peers() const {
  if (const auto lost = transfer_->lost(); !lost.empty()) throw std::runtime_error(name_ + ": " + lost.text());
}

void Running::check() const {
  try {
    check_();
  } catch (const std::exception& error) {
    throw std::runtime_error(name_ + " is wrong " + error.what());
  }
}

Running Rank::start(const Call& call) {
  switch (call.kind) {
    case Call::Kind::all_reduce: return all_reduce(call);
    case Call::Kind::reduce: return reduce(call);
    case Call::Kind::all_gather: return all_gather(call);
    case Call::Kind::reduce_scatter: return reduce_scatter(call);
    case Call::Kind::broadcast: return broadcast(call);
    case Call::Kind::all_to_all: return all_to_all(call);
    default: throw std::logic_error("this kind is made of the others");
  }
}

Numbers Rank::numbers(const Source& source, size_t count) const {
  auto numbers = make_numbers(source, rank_, count);
  if (wrong) spoil(numbers);
  return numbers;
}

Running Rank::run(const Call& call, Operations operations, std::function<void()> check) {
  std::string name = operations.first->signature.call(Members{}).kind;
  if (call.kind == Call::Kind::all_gather) name += " (" + std::to_string(call.count) + " from a rank)";
  return {std::move(name), own_->start(std::move(operations)), std::move(check)};
}

// On some ranks, copies the tensor to shared memory: to a new block, or to one that may have been used before.
std::shared_ptr<char> Rank::shared_copy(const Call& call, Numbers& data) const {
  const auto drawn = call.source.seed >> rank_;
  if (drawn % 2 == 0) return nullptr;
  if (drawn % 4 == 1) return {SharedBlocks::copy(data.data(), data.bytes()), SharedBlocks::free};
  char* memory = SharedBlocks::take(data.bytes());
  if (data.bytes()) std::memcpy(memory, data.data(), data.bytes());
  return {memory, SharedBlocks::free};
}

// All ranks must have the same bits, so only one rank checks the values.
Running Rank::all_reduce(const Call& call) {
  auto data = std::make_shared<Numbers>(numbers(call.source, call.count));
  const auto shared = shared_copy(call, *data);
  char* to = shared ? shared.get() : data->data();
  const Signature signature{Signature::Kind::all_reduce, call.source.type, call.source.reduction,
                            call.wire,                   -1,               data->bytes()};
  auto operation = make_all_reduce(*own_, to, signature);
  const size_t result = results_++;
  return run(call, {operation}, [=] {
    if (shared && data->bytes()) std::memcpy(data->data(), shared.get(), data->bytes());
    meeting_.compare(result, data->digest());
    if (static_cast<int>(call.source.seed % size_) != rank_) return;
    if (operation->signature.wire == Wire::bfloat16) {
      expect_compressed_sum(*data, call.source, meeting_.host_of);
    } else {
      expect_reduced(*data, call.source, size_);
    }
  });
}

// When the reduce is done, the ranks other than the root overwrite their memory: they own it again.
Running Rank::reduce(const Call& call) {
  auto data = std::make_shared<Numbers>(numbers(call.source, call.count));
  const auto shared = shared_copy(call, *data);
  char* to = shared ? shared.get() : data->data();
  const Signature signature{Signature::Kind::reduce, call.source.type, call.source.reduction, Wire::exact, call.root,
                            data->bytes()};
  return run(call, {make_all_reduce(*own_, to, signature)}, [=] {
    if (rank_ != call.root) {
      if (data->bytes()) std::memset(to, 0x55, data->bytes());
      return;
    }
    if (shared && data->bytes()) std::memcpy(data->data(), shared.get(), data->bytes());
    expect_reduced(*data, call.source, size_);
  });
}

namespace {

// Places the parts side by side.
void place_in(char* row, Parts& parts) {
  for (auto& each : parts) each.data = row, row += each.bytes;
}

}  // namespace

Running Rank::all_gather(const Call& call) {
  auto mine = std::make_shared<Numbers>(numbers(call.source, count_of(call, rank_)));
  Tensors all = std::make_shared<std::vector<Numbers>>();
  Parts outputs;
  for (int rank = 0; rank < size_; ++rank) all->emplace_back(call.source.type, count_of(call, rank));
  if (call.in_place) (*all)[rank_] = *mine;
  for (auto& each : *all) outputs.push_back(part(each));
  const auto row = in_a_row(call, *all);
  if (row) place_in(row.get(), outputs);
  const bool is_part = call.in_place && outputs[rank_].bytes > 0;  // else it may begin at the address of the next one
  const char* input = is_part ? outputs[rank_].data : mine->data();
  return run(call, {make_all_gather(*own_, input, outputs)}, [=] {
    for (int rank = 0; rank < size_; ++rank) {
      const auto [output, bytes] = outputs[rank];
      if (row && bytes) std::memcpy((*all)[rank].data(), output, bytes);
      expect_numbers((*all)[rank], call.source, rank);
      if (bytes) std::memset(output, 0x55, bytes);  // this rank owns the memory again
    }
    static_cast<void>(mine);
  });
}

Running Rank::reduce_scatter(const Call& call) {
  Tensors inputs = std::make_shared<std::vector<Numbers>>();
  for (int to = 0; to < size_; ++to) inputs->push_back(numbers(of_tensor(call.source, to), count_of(call, to)));
  auto apart = std::make_shared<Numbers>(call.source.type, count_of(call, rank_));
  Parts parts;
  for (auto& each : *inputs) parts.push_back(part(each));
  const auto row = call.in_place ? nullptr : in_a_row(call, *inputs);
  if (row) place_in(row.get(), parts);
  Numbers& output = call.in_place ? (*inputs)[rank_] : *apart;
  auto operation = make_reduce_scatter(*own_, output.data(), parts, call.source.type, call.source.reduction);
  return run(call, {operation}, [=, &output] {
    expect_reduced(output, of_tensor(call.source, rank_), size_);
    const auto all = size_of_all(parts);
    if (row && all) std::memset(row.get(), 0x55, all);  // this rank owns the memory again
    static_cast<void>(inputs), static_cast<void>(apart);
  });
}

// On some ranks, returns shared memory that holds all of the tensors side by side.
std::shared_ptr<char> Rank::in_a_row(const Call& call, std::vector<Numbers>& tensors) const {
  size_t bytes = 0;
  for (const auto& each : tensors) bytes += each.bytes();
  Numbers all(NumberType::uint8, bytes);
  char* to = all.data();
  for (auto& each : tensors) {
    if (each.bytes()) std::memcpy(to, each.data(), each.bytes());
    to += each.bytes();
  }
  return shared_copy(call, all);
}

Running Rank::broadcast(const Call& call) {
  auto data = std::make_shared<Numbers>(numbers(call.source, call.count));
  return run(call, {make_broadcast(*own_, data->data(), data->bytes(), call.root)},
             [=] { expect_numbers(*data, call.source, call.root); });
}

Running Rank::all_to_all(const Call& call) {
  Tensors sent = std::make_shared<std::vector<Numbers>>(), received = std::make_shared<std::vector<Numbers>>();
  const auto count = [&](int from, int to) { return call.uneven ? (from + 2 * to) % 4 * call.count / 2 : call.count; };
  Parts to(size_), from(size_);
  for (int rank = 0; rank < size_; ++rank) {
    const bool sends = call.root < 0 || rank == call.root, receives = call.root < 0 || rank_ == call.root;
    sent->push_back(numbers(of_tensor(call.source, rank), sends ? count(rank_, rank) : 0));
    received->emplace_back(call.source.type, receives ? count(rank, rank_) : 0);
    if (sends) to[rank] = part(sent->back());
    if (receives) from[rank] = part(received->back());
  }
  return run(call, make_all_to_all(*own_, to, from), [=] {
    for (auto& each : *sent) std::fill(each.memory.begin(), each.memory.end(), 0x55);  // the caller owns it again
    for (int rank = 0; rank < size_; ++rank) expect_numbers((*received)[rank], of_tensor(call.source, rank_), rank);
  });
}

}  // namespace cpulaunch
