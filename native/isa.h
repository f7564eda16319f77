// Which instruction sets were built in and which of them this processor runs.
#pragma once
#include <string>
#include <vector>

#include "kernels/abi.h"

namespace yeoul {

// Names of the levels that were built and that run here, best first; the last is always "generic".
std::vector<std::string> isa_levels();

// The kernels of a level. Throws std::invalid_argument naming the levels that would work.
const KernelTable& kernels_for(const std::string& level);

}  // namespace yeoul
