// Whether memory is lent as it should be, without a group.

#pragma once

namespace cpulaunch {

// Throws std::runtime_error where it is not.
void check_lending();

}  // namespace cpulaunch
