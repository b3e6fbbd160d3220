#include "transport_own.hpp"

#include "reduction.hpp"

namespace cpulaunch {

namespace {

using Kind = Signature::Kind;

Signature with_root(Kind kind, int root) {
  Signature signature{kind};
  signature.root = root;
  return signature;
}

Reduction reduction_of(Transport::Op op) {
  using c10d::ReduceOp;
  switch (op) {
    case ReduceOp::AVG: return Reduction::average;
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM: return Reduction::sum;
    case ReduceOp::PRODUCT: return Reduction::product;
    case ReduceOp::MIN: return Reduction::min;
    case ReduceOp::MAX: return Reduction::max;
    case ReduceOp::BAND: return Reduction::bit_and;
    case ReduceOp::BOR: return Reduction::bit_or;
    case ReduceOp::BXOR: return Reduction::bit_xor;
    default: TORCH_CHECK_VALUE(false, "ccl: unknown reduction ", static_cast<int>(op));
  }
}

char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

// Where there are no numbers there is no memory either, and yet the other rank is to know that none will come.
Part part_of(const at::Tensor& tensor) {
  static char nothing;
  return {tensor.numel() ? data_of(tensor) : &nothing, tensor.nbytes()};
}

std::vector<Part> parts_of(const Transport::Tensors& tensors) {
  std::vector<Part> parts;
  for (const auto& tensor : tensors) parts.push_back(part_of(tensor));
  return parts;
}

// Only what goes to one rank, or comes from it.
std::vector<Part> only(const at::Tensor& tensor, int rank, int size) {
  std::vector<Part> parts(size);
  parts[rank] = part_of(tensor);
  return parts;
}

std::vector<size_t> sizes_of(const Transport::Tensors& tensors) {
  std::vector<size_t> sizes;
  for (const auto& tensor : tensors) sizes.push_back(tensor.nbytes());
  return sizes;
}

}  // namespace

void OwnTransport::check_reduction(c10::ScalarType type, Op op) const {
  const auto number = number_type_of(type);
  const auto reduction = cpulaunch::reduction_of(op);
  check_scaling(type, op);
  TORCH_CHECK_VALUE(!c10::isComplexType(type) || reduction == Reduction::sum || reduction == Reduction::average,
                    "ccl: complex tensors can be reduced with SUM and AVG only");
  TORCH_CHECK_VALUE(reduce_for(number, reduction), "ccl: tensors of type ", type, " have no ", name_of(reduction));
}

OwnTransport::Result OwnTransport::start(std::vector<OperationPtr> operations) {
  auto all = std::make_unique<CombinedTransfer>();
  for (auto& operation : operations) all->add(hierarchy_->start(std::move(operation)));
  return all;
}

OwnTransport::Result OwnTransport::reduce_in_place(const at::Tensor& data, Op op, Signature signature) {
  signature.type = number_type_of(data.scalar_type());
  signature.reduction = cpulaunch::reduction_of(op);
  signature.bytes = data.nbytes();
  return hierarchy_->start(make_all_reduce(*hierarchy_, data_of(data), signature));
}

OwnTransport::Result OwnTransport::all_reduce(CclWork&, const at::Tensor& data, Op op, Wire wire) {
  Signature signature{Kind::all_reduce};
  signature.wire = wire;
  return reduce_in_place(data, op, signature);
}

// All ranks get the sum, in memory that all but the root throw away.
OwnTransport::Result OwnTransport::reduce(CclWork&, const at::Tensor& from, const at::Tensor& to, Op op,
                                          int root) {
  if (!to.is_same(from)) to.copy_(from);
  return reduce_in_place(to, op, with_root(Kind::reduce, root));
}

OwnTransport::Result OwnTransport::barrier(CclWork&, const at::Tensor& token) {
  return reduce_in_place(token, Op::MAX, {Kind::barrier});
}

OwnTransport::Result OwnTransport::broadcast(CclWork&, const at::Tensor& data, int root) {
  return hierarchy_->start(make_broadcast(*hierarchy_, data_of(data), data.nbytes(), root));
}

OwnTransport::Result OwnTransport::all_gather(CclWork&, const Tensors& outputs, const at::Tensor& input) {
  std::vector<char*> to;
  for (const auto& output : outputs) to.push_back(data_of(output));
  return hierarchy_->start(make_all_gather(*hierarchy_, data_of(input), std::move(to), sizes_of(outputs)));
}

OwnTransport::Result OwnTransport::reduce_scatter(CclWork&, const at::Tensor& output, const Tensors& inputs,
                                                  Op op) {
  std::vector<const char*> from;
  for (const auto& input : inputs) from.push_back(data_of(input));
  return hierarchy_->start(make_reduce_scatter(*hierarchy_, data_of(output), std::move(from), sizes_of(inputs),
                                               number_type_of(output.scalar_type()), cpulaunch::reduction_of(op)));
}

OwnTransport::Result OwnTransport::exchange(std::vector<Part> sent, std::vector<Part> received,
                                            const Signature& signature) {
  return start(make_all_to_all(*hierarchy_, std::move(sent), std::move(received), signature));
}

OwnTransport::Result OwnTransport::all_to_all(CclWork&, const Tensors& outputs, const Tensors& inputs) {
  return exchange(parts_of(inputs), parts_of(outputs), {Kind::all_to_all});
}

OwnTransport::Result OwnTransport::gather(CclWork&, const Tensors& outputs, const at::Tensor& input, int root) {
  const int size = hierarchy_->layout.size;
  return exchange(only(input, root, size), outputs.empty() ? std::vector<Part>(size) : parts_of(outputs),
                  with_root(Kind::gather, root));
}

OwnTransport::Result OwnTransport::scatter(CclWork&, const at::Tensor& output, const Tensors& inputs, int root) {
  const int size = hierarchy_->layout.size;
  return exchange(inputs.empty() ? std::vector<Part>(size) : parts_of(inputs), only(output, root, size),
                  with_root(Kind::scatter, root));
}

OwnTransport::Result OwnTransport::send(const at::Tensor& tensor, int to, int tag) {
  return messages_->send(to, tag, data_of(tensor), tensor.nbytes());
}

OwnTransport::Result OwnTransport::receive(const at::Tensor& tensor, int from, int tag, std::shared_ptr<int> source) {
  return messages_->receive(from, tag, data_of(tensor), tensor.nbytes(), std::move(source));
}

}  // namespace cpulaunch
