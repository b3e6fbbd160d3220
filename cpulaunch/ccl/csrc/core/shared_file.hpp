// Files in memory that processes of a host share.  They have no name, so that nothing of them can stay behind.

#pragma once

#include <cstddef>
#include <utility>

namespace cpulaunch {

// A descriptor of a new file of `size` bytes, zeroes; -1 where there is none to be had.
int create_shared_file(size_t size);
// Gives back what is in the file from `begin` on, also where others have mapped it; zeroes are there then.
void empty_shared_file(int descriptor, size_t begin, size_t size);
// Takes the place of a mapping of the file: what is written there from now on is this process's alone.
bool make_private(char* memory, int descriptor, size_t size);
// Null where it can't be mapped.
char* map_shared_file(int descriptor, size_t size);
// Gives a new mapping of a new file pages of 2 MB, where the kernel can: they are made several times as fast as small
// ones, and fewer addresses are looked up, here and in the mappings of other processes.
void use_huge_pages(char* memory, size_t size);
// The size of a file that has pages of 2 MB only, if it is not small.
size_t round_to_pages(size_t size);
// Maps the file that has this descriptor in another process, and tells its size.  Null, with errno, where this process
// may not open it (it belongs to another user, for example).
std::pair<char*, size_t> open_shared_file(int pid, int descriptor);

}  // namespace cpulaunch
