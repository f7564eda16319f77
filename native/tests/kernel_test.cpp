// Runs every kernel of every level that this processor has against plain loops in double precision.
//   kernel_test [--quick]     fewer and smaller cases, for an emulator
#include "check.h"

#include <csignal>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace yeoul::test {
namespace {

const char* volatile running = "start";

void crashed(int) {
  const char* parts[] = {"kernel_test: crashed in ", running, " (a guard page, or worse)\n"};
  for (const char* part : parts)
    if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  _exit(3);
}

}  // namespace

Tally& tally() {
  static Tally instance;
  return instance;
}

Digests& digests() {
  static Digests instance;
  return instance;
}

void begin(const char* name) {
  running = name;
  std::printf("%s\n", name);
  std::fflush(stdout);
}

void fail(const char* file, int line, const char* condition, const std::string& about) {
  if (++tally().failed <= 40) std::printf("%s:%d: %s: %s\n", file, line, condition, about.c_str());
}

std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

void Digests::compare_and_print() const {
  const std::uint64_t* first = nullptr;
  for (const auto& [level, hash] : hashes_) {
    std::printf("digest of all results, %s: %016llx\n", level.c_str(), static_cast<unsigned long long>(hash));
    if (level == "generic") continue;  // its multiply-add rounds twice
    if (first) CHECK(hash == *first, "level %s has other bits than the level before", level.c_str());
    first = &hash;
  }
}

std::vector<const KernelTable*> levels() {
  std::vector<const KernelTable*> all;
  for (const auto& name : isa_levels()) all.push_back(&kernels_for(name));
  return all;
}

void test_levels() {
  for (const auto& name : isa_levels()) CHECK(name == kernels_for(name).name, "%s", name.c_str());
  CHECK(isa_levels().back() == "generic", "the last level");
  std::string message;
  try {
    kernels_for("mmx");
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message.find("mmx") != std::string::npos && message.find("generic") != std::string::npos, "%s", message.c_str());
}

}  // namespace yeoul::test

int main(int argc, char** argv) {
  using namespace yeoul::test;
  const bool quick = argc == 2 && std::strcmp(argv[1], "--quick") == 0;
  if (argc > 2 || (argc == 2 && !quick)) {
    std::fprintf(stderr, "usage: kernel_test [--quick]\n");
    return 2;
  }
  std::signal(SIGSEGV, crashed);
  std::signal(SIGBUS, crashed);
  const std::pair<const char*, void (*)(bool)> tests[] = {
      {"levels", [](bool) { test_levels(); }}, {"rows", test_rows},           {"vocabulary", test_vocabulary},
      {"linear", test_linear},                 {"kv_write", test_kv_write},   {"attention", test_attention},
      {"sampler", test_sampler},               {"pool", test_pool},
  };
  for (const auto& [name, test] : tests) {
    begin(name);
    test(quick);
  }
  digests().compare_and_print();
  std::printf("%ld passed, %ld failed\n", tally().passed, tally().failed);
  return tally().failed == 0 ? 0 : 1;
}
