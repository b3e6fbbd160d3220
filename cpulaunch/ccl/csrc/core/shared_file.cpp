#include "shared_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

namespace cpulaunch {

namespace {

constexpr size_t kHugePage = 2 << 20;  // bytes
constexpr int kCollapse = 25;          // MADV_COLLAPSE, of Linux 6.1, which older headers lack
constexpr unsigned kNoExecSeal = 8;    // MFD_NOEXEC_SEAL, of Linux 6.3

char* map_at(void* address, int descriptor, size_t size) {
  const int flags = MAP_SHARED | (address ? MAP_FIXED : 0);
  void* memory = mmap(address, size, PROT_READ | PROT_WRITE, flags, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

int open_in(int pid, int descriptor) {
  if (pid == getpid()) return fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

}  // namespace

// The file is not executable, because a host may insist on that (vm.memfd_noexec).  It is sealed against shrinking:
// otherwise, a process that maps it could shrink it, and the others would get SIGBUS when they read the missing part.
int create_shared_file(size_t size) {
  int descriptor = -1;
  for (const unsigned flags : {MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal, MFD_CLOEXEC | MFD_ALLOW_SEALING}) {
    descriptor = static_cast<int>(syscall(SYS_memfd_create, "cpulaunch-ccl", flags));
    if (descriptor >= 0 || errno != EINVAL) break;  // kernels before 6.3 don't know MFD_NOEXEC_SEAL
  }
  if (descriptor < 0) return -1;
  if (ftruncate(descriptor, static_cast<off_t>(size)) != 0 || fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    close(descriptor);
    return -1;
  }
  return descriptor;
}

void empty_shared_file(int descriptor, size_t begin, size_t size) {
  fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
            static_cast<off_t>(size - begin));
}

bool make_private(char* memory, int descriptor, size_t size) {
  return mmap(memory, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, descriptor, 0) != MAP_FAILED;
}

char* map_shared_file(int descriptor, size_t size) {
  if (size < kHugePage) return map_at(nullptr, descriptor, size);
  // A huge page can be mapped as one only at an address that is a multiple of its size.
  void* reserved = mmap(nullptr, size + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(reserved);
  char* aligned = begin + (-reinterpret_cast<uintptr_t>(begin)) % kHugePage;
  const size_t page = getpagesize(), used = (size + page - 1) / page * page;
  if (aligned > begin) munmap(begin, aligned - begin);
  munmap(aligned + used, begin + kHugePage - aligned);
  char* memory = map_at(aligned, descriptor, size);
  if (!memory) munmap(aligned, size);
  return memory;
}

// Writes a byte to each huge page first, because the kernel collapses only regions with at least one small page.
void use_huge_pages(char* memory, size_t size) {
  const size_t whole = size / kHugePage * kHugePage;
  for (size_t at = 0; at < whole; at += kHugePage) memory[at] = 0;
  if (whole) madvise(memory, whole, kCollapse);
}

size_t round_to_pages(size_t size) {
  return size < kHugePage ? size : (size + kHugePage - 1) / kHugePage * kHugePage;
}

std::pair<char*, size_t> open_shared_file(int pid, int descriptor) {
  const int own = open_in(pid, descriptor);
  if (own < 0) return {nullptr, 0};
  struct stat found {};
  char* memory = nullptr;
  if (fstat(own, &found) == 0) memory = map_shared_file(own, found.st_size);
  const int error = errno;
  close(own);
  errno = error;
  return {memory, memory ? static_cast<size_t>(found.st_size) : 0};
}

}  // namespace cpulaunch
