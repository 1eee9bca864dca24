// Finds cubins by the SHA-256 of their bytes and loads each once into every context that asks for it.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "sha256.h"

namespace jfa {

// A directory holds a cubin as `<sha256 in lower-case hexadecimal>.cubin`. Thread-safe.
class CubinStore {
 public:
  // The store of the process; never destroyed.
  static CubinStore& Global();

  // Searches `directory` after those added before; adding one twice does nothing.
  void AddDirectory(const std::string& directory);

  // The module of a cubin in `context`, which must be current. `where` begins every error's message. Throws Error:
  // kNotFound (no such file; lists the directories), kDataLoss (found, but damaged), or what the driver says. A failure
  // is not remembered, so that a repaired directory works at the next call.
  cu::Module Load(const cu::Driver& driver, cu::Context context, const Sha256Digest& sha256, const std::string& where);

 private:
  std::string Read(const Sha256Digest& sha256, const std::string& where) const;

  std::mutex mutex_;
  std::vector<std::string> directories_;
  std::map<std::pair<cu::Context, Sha256Digest>, cu::Module> modules_;
};

}  // namespace jfa
