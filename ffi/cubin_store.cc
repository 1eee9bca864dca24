#include "cubin_store.h"

#include <elf.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>

#include "error.h"

namespace jfa {
namespace {

// The driver is given an address without a size, so that what the ELF header points at must lie inside the file.
bool IsWholeElf(const std::string& bytes) {
  Elf64_Ehdr header;
  if (bytes.size() < sizeof(header)) return false;
  std::memcpy(&header, bytes.data(), sizeof(header));
  auto inside = [&](uint64_t offset, uint64_t size) { return offset <= bytes.size() && size <= bytes.size() - offset; };
  return std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 && header.e_ident[EI_CLASS] == ELFCLASS64 &&
         inside(header.e_shoff, uint64_t{header.e_shnum} * header.e_shentsize) &&
         inside(header.e_phoff, uint64_t{header.e_phnum} * header.e_phentsize);
}

}  // namespace

CubinStore& CubinStore::Global() {
  static CubinStore* const store = new CubinStore();
  return *store;
}

void CubinStore::AddDirectory(const std::string& directory) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(directories_.begin(), directories_.end(), directory) == directories_.end()) {
    directories_.push_back(directory);
  }
}

std::string CubinStore::Read(const Sha256Digest& sha256, const std::string& where) const {
  const std::string file = Hex(sha256) + ".cubin";
  std::string damaged;
  for (const std::string& directory : directories_) {
    const std::string path = directory + "/" + file;
    errno = 0;
    std::ifstream in(path, std::ios::binary);
    if (!in) {
      if (errno != ENOENT && errno != ENOTDIR) damaged += Concat("; ", path, ": ", std::strerror(errno));
      continue;
    }
    std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    if (in.bad()) {
      damaged += Concat("; ", path, " cannot be read");
    } else if (Sha256Digest found = Sha256(bytes); found != sha256) {
      damaged += Concat("; ", path, " is damaged: its ", bytes.size(), " bytes have sha256 ", Hex(found));
    } else if (!IsWholeElf(bytes)) {
      damaged += Concat("; ", path, " is not a whole cubin: ", bytes.size(), " bytes");
    } else {
      return bytes;
    }
  }
  if (!damaged.empty()) throw Error(ErrorCode::kDataLoss, Concat(where, ": no usable cubin", damaged));
  std::string searched;
  for (const std::string& directory : directories_) searched += (searched.empty() ? "" : ", ") + directory;
  throw Error(ErrorCode::kNotFound, Concat(where, ": no cubin ", file, " in ",
                                           searched.empty() ? "any directory: none was added" : searched));
}

cu::Module CubinStore::Load(const cu::Driver& driver, cu::Context context, const Sha256Digest& sha256,
                            const std::string& where) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto key = std::make_pair(context, sha256);
  if (auto known = modules_.find(key); known != modules_.end()) return known->second;
  const std::string bytes = Read(sha256, where);
  cu::Module module = nullptr;
  driver.Check(driver.ModuleLoadData(&module, bytes.data()), "cuModuleLoadData",
               [&] { return Concat(where, ": cubin ", Hex(sha256)); });
  modules_.emplace(key, module);
  return module;
}

}  // namespace jfa
