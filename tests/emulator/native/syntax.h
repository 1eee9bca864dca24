// The parser's result: a module as written, with registers already given slots. decode.cc turns it into a Program.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace emu {

/// Names visible in one brace level.
struct SyntaxScope {
  int parent = -1;
  struct Register { Slot slot; Type type; };
  std::unordered_map<std::string, Register> registers;
  struct Family { Slot first; uint32_t count; Type type; };
  std::unordered_map<std::string, Family> families;          // "%r" of ".reg .b32 %r<8>"
  std::unordered_map<std::string, uint32_t> labels;          // statement index
  std::unordered_map<std::string, size_t> variables;         // index into SyntaxFunction::variables
  std::unordered_map<std::string, std::vector<std::string>> tables;   // .branchtargets
};

struct SyntaxFunction {
  Function info;
  std::vector<Parameter> returns;
  std::vector<Statement> body;
  std::vector<SyntaxScope> scopes;
  std::vector<Variable> variables;      // .shared, .local and .param variables of the body
  bool has_body = false;
  int line = 0;
};

struct SyntaxModule {
  std::vector<SyntaxFunction> functions;
  std::vector<Variable> variables;      // module scope
  std::map<int, std::string> files;
  std::string target;
};

/// Splits and parses; throws Verdict(parse or unsupported) with line and text.
SyntaxModule parse_module(const std::string& text, const std::vector<std::string>& lines);

/// Bytes of the slot of a register of this type.
uint32_t slot_bytes(Type type);

}  // namespace emu
