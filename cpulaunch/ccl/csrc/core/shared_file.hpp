// Files in memory that processes of a host share.  They have no name, so they are freed with the last process that uses
// them.

#pragma once

#include <cstddef>
#include <utility>

namespace cpulaunch {

// Returns a descriptor of a new file of `size` bytes, all zero; -1 if that fails.
int create_shared_file(size_t size);
// Gives the memory of the file from `begin` on back to the system, even if others have mapped it.  It then reads as
// zeros.
void empty_shared_file(int descriptor, size_t begin, size_t size);
// Replaces a mapping of the file by a private one: other processes don't see what this one writes from now on.
bool make_private(char* memory, int descriptor, size_t size);
// Returns null if the file can't be mapped.
char* map_shared_file(int descriptor, size_t size);
// Makes the kernel use pages of 2 MB, if it can, for a new mapping of a new file.  Making them is several times as fast
// as making small pages, and they take fewer address translations, also in the mappings of other processes.
void use_huge_pages(char* memory, size_t size);
// Rounds the size of a file up to whole pages of 2 MB, unless it is smaller than one.
size_t round_to_pages(size_t size);
// Maps the file that has this descriptor in another process, and returns its size, too.  Returns null and sets errno if
// this process may not open it, for example because it belongs to another user.
std::pair<char*, size_t> open_shared_file(int pid, int descriptor);

}  // namespace cpulaunch
