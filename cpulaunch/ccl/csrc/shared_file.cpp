#include "shared_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace cpulaunch {

namespace {

int open_in(int pid, int descriptor) {
  if (pid == getpid()) return fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

}  // namespace

int create_shared_file(size_t size) {
  const int descriptor = static_cast<int>(syscall(SYS_memfd_create, "cpulaunch-ccl", 1u /* MFD_CLOEXEC */));
  if (descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(size)) != 0) {
    close(descriptor);
    return -1;
  }
  return descriptor;
}

char* map_shared_file(int descriptor, size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
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
