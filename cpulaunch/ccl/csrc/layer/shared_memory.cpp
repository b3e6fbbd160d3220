#include "shared_memory.hpp"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "interface.h"

namespace cpulaunch {

namespace {

// The fewest bytes for which shared memory pays off.  Smaller tensors, too, would need a descriptor and a mapping, and
// collectives copy them faster than they look them up.
constexpr size_t kLeastShared = 64 << 10;

void free_block(void* memory) { cl_block_free(static_cast<char*>(memory)); }

class BlockAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    char* memory = bytes < kLeastShared ? nullptr : cl_block_take(bytes);
    return memory ? at::DataPtr(memory, memory, free_block, at::kCPU) : c10::GetCPUAllocator()->allocate(bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

bool share_memory(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto* from = static_cast<const char*>(storage->data());
  const size_t bytes = storage->nbytes();
  if (cl_block_holds(from, bytes)) return true;
  char* memory = cl_block_copy(from, bytes);
  if (!memory) return false;
  storage->set_data_ptr(at::DataPtr(memory, memory, free_block, at::kCPU));
  return true;
}

at::Tensor allocate_shared(int64_t size, const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(size >= 0, "ccl allocate_tensor: a tensor can't have ", size, " elements");
  TORCH_CHECK_VALUE(options.device().is_cpu() && options.layout() == at::kStrided,
                    "ccl allocate_tensor: only dense tensors on the CPU lie in memory that ranks share, got ", options);
  static auto* allocator = new BlockAllocator;  // tensors may outlive everything else
  const auto type = c10::typeMetaToScalarType(options.dtype());
  return at::detail::empty_generic({size}, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt);
}

}  // namespace cpulaunch
