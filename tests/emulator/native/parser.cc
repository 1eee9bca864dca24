// PTX text -> SyntaxModule (PTX ISA, chapters 4 and 5).
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "syntax.h"

namespace emu {
namespace {

struct TypeInfo { const char* name; Type type; int bits; };
constexpr TypeInfo kTypes[] = {
    {"pred", Type::pred, 1}, {"b8", Type::b8, 8}, {"b16", Type::b16, 16}, {"b32", Type::b32, 32}, {"b64", Type::b64, 64},
    {"b128", Type::b128, 128}, {"u8", Type::u8, 8}, {"u16", Type::u16, 16}, {"u32", Type::u32, 32}, {"u64", Type::u64, 64},
    {"s8", Type::s8, 8}, {"s16", Type::s16, 16}, {"s32", Type::s32, 32}, {"s64", Type::s64, 64}, {"f16", Type::f16, 16},
    {"f16x2", Type::f16x2, 32}, {"bf16", Type::bf16, 16}, {"bf16x2", Type::bf16x2, 32}, {"tf32", Type::tf32, 32},
    {"f32", Type::f32, 32}, {"f32x2", Type::f32x2, 64}, {"f64", Type::f64, 64}, {"e4m3x2", Type::e4m3x2, 16},
    {"e5m2x2", Type::e5m2x2, 16}, {"e2m3x2", Type::e2m3x2, 16}, {"e3m2x2", Type::e3m2x2, 16}, {"e2m1x2", Type::e2m1x2, 8},
    {"ue8m0x2", Type::ue8m0x2, 16}, {"e4m3x4", Type::e4m3x4, 32}, {"e5m2x4", Type::e5m2x4, 32}, {"e2m3x4", Type::e2m3x4, 32},
    {"e3m2x4", Type::e3m2x4, 32}, {"e2m1x4", Type::e2m1x4, 16}, {"u16x2", Type::u16x2, 32}, {"s16x2", Type::s16x2, 32}};

enum class Tok : uint8_t { end, name, number, dotted, string, punct };

struct Token {
  Tok kind = Tok::end;
  std::string text;       // name; dotted without its dot; punct: one character
  int line = 0;
  bool glued = false;     // follows the previous token without space
  uint64_t value = 0;     // number: integer bits or bits of the double / float
  bool is_double = false, is_single = false;
};

bool name_start(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%'; }
bool name_part(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$'; }

class Lexer {
 public:
  Lexer(const std::string& text, const std::vector<std::string>& lines) : text_(text), lines_(lines) {}

  std::vector<Token> run() {
    std::vector<Token> out;
    out.reserve(text_.size() / 4);
    for (;;) {
      size_t before = at_;
      skip_space();
      Token token = next();
      token.glued = before == start_ && !out.empty();
      out.push_back(std::move(token));
      if (out.back().kind == Tok::end) return out;
    }
  }

 private:
  [[noreturn]] void error(const std::string& what) {
    Verdict verdict(Fault::parse, what);
    verdict.line = line_;
    if (line_ >= 1 && line_ <= static_cast<int>(lines_.size())) verdict.text = lines_[line_ - 1];
    throw verdict;
  }

  void skip_space() {
    while (at_ < text_.size()) {
      char c = text_[at_];
      if (c == '\n') { ++line_; ++at_; }
      else if (c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v') ++at_;
      else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '/') {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '*') {
        size_t end = text_.find("*/", at_ + 2);
        if (end == std::string::npos) error("comment without an end");
        for (; at_ < end + 2; ++at_) line_ += text_[at_] == '\n';
      } else break;
    }
    start_ = at_;
  }

  Token next() {
    Token token;
    token.line = line_;
    if (at_ >= text_.size()) return token;
    char c = text_[at_];
    if (name_start(c)) {
      size_t begin = at_++;
      while (at_ < text_.size() && name_part(text_[at_])) ++at_;
      token.kind = Tok::name;
      token.text = text_.substr(begin, at_ - begin);
      return token;
    }
    if (c == '.' && at_ + 1 < text_.size() && (name_part(text_[at_ + 1]))) {
      size_t begin = ++at_;
      while (at_ < text_.size() &&
             (name_part(text_[at_]) || (text_[at_] == ':' && at_ + 2 < text_.size() && text_[at_ + 1] == ':' &&
                                        name_part(text_[at_ + 2])))) {
        at_ += text_[at_] == ':' ? 2 : 1;
      }
      token.kind = Tok::dotted;
      token.text = text_.substr(begin, at_ - begin);
      return token;
    }
    if (std::isdigit(static_cast<unsigned char>(c))) return number();
    if (c == '"') {
      size_t end = at_ + 1;
      while (end < text_.size() && text_[end] != '"' && text_[end] != '\n') end += text_[end] == '\\' ? 2 : 1;
      if (end >= text_.size() || text_[end] != '"') error("string without an end");
      token.kind = Tok::string;
      token.text = text_.substr(at_ + 1, end - at_ - 1);
      at_ = end + 1;
      return token;
    }
    token.kind = Tok::punct;
    token.text = std::string(1, c);
    ++at_;
    return token;
  }

  Token number() {
    Token token;
    token.line = line_;
    token.kind = Tok::number;
    const char* begin = text_.c_str() + at_;
    char* end = nullptr;
    if (begin[0] == '0' && (begin[1] == 'f' || begin[1] == 'F' || begin[1] == 'd' || begin[1] == 'D')) {
      size_t digits = (begin[1] == 'f' || begin[1] == 'F') ? 8 : 16;
      for (size_t i = 0; i < digits; ++i)
        if (!std::isxdigit(static_cast<unsigned char>(begin[2 + i]))) error("malformed floating-point literal");
      token.value = std::strtoull(std::string(begin + 2, digits).c_str(), nullptr, 16);
      token.is_single = digits == 8;
      token.is_double = digits == 16;
      at_ += 2 + digits;
      if (at_ < text_.size() && name_part(text_[at_])) error("malformed floating-point literal");
      token.text.assign(begin, 2 + digits);
      return token;
    }
    if (begin[0] == '0' && (begin[1] == 'x' || begin[1] == 'X')) token.value = std::strtoull(begin + 2, &end, 16);
    else if (begin[0] == '0' && (begin[1] == 'b' || begin[1] == 'B')) token.value = std::strtoull(begin + 2, &end, 2);
    else {
      size_t i = 0;
      while (std::isdigit(static_cast<unsigned char>(begin[i]))) ++i;
      bool fraction = begin[i] == '.' && std::isdigit(static_cast<unsigned char>(begin[i + 1]));
      bool point = begin[i] == '.' && !name_part(begin[i + 1]) && begin[i + 1] != '.';
      bool exponent = (begin[i] == 'e' || begin[i] == 'E');
      if (fraction || point || exponent) {
        double value = std::strtod(begin, &end);
        std::memcpy(&token.value, &value, 8);
        token.is_double = true;
      } else {
        token.value = std::strtoull(begin, &end, begin[0] == '0' ? 8 : 10);
      }
    }
    token.text.assign(begin, end - begin);
    at_ += end - begin;
    if (at_ < text_.size() && (text_[at_] == 'U' || text_[at_] == 'u')) ++at_;
    if (at_ < text_.size() && name_part(text_[at_])) error("malformed number '" + token.text + text_[at_] + "'");
    return token;
  }

  const std::string& text_;
  const std::vector<std::string>& lines_;
  size_t at_ = 0, start_ = 0;
  int line_ = 1;
};

uint64_t round_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::vector<std::string>& lines) : tokens_(std::move(tokens)), lines_(lines) {}

  SyntaxModule run() {
    while (peek().kind != Tok::end) top_level();
    return std::move(module_);
  }

 private:
  // ------------------------------------------------------------ tokens
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  const Token& take() {
    const Token& token = peek();
    if (at_ < tokens_.size() - 1) ++at_;
    return token;
  }
  bool is(const char* punct, size_t ahead = 0) const {
    return peek(ahead).kind == Tok::punct && peek(ahead).text == punct;
  }
  bool accept(const char* punct) {
    if (!is(punct)) return false;
    take();
    return true;
  }
  bool accept_dotted(const char* name) {
    if (peek().kind != Tok::dotted || peek().text != name) return false;
    take();
    return true;
  }
  void expect(const char* punct) {
    if (!accept(punct)) error(std::string("expected '") + punct + "', found '" + shown(peek()) + "'");
  }
  static std::string shown(const Token& token) {
    if (token.kind == Tok::end) return "end of text";
    return token.kind == Tok::dotted ? "." + token.text : token.text;
  }
  std::string need_name(const char* what) {
    if (peek().kind != Tok::name) error(std::string("expected ") + what + ", found '" + shown(peek()) + "'");
    return take().text;
  }
  uint64_t need_integer(const char* what) {
    if (peek().kind != Tok::number || peek().is_double || peek().is_single)
      error(std::string("expected ") + what + ", found '" + shown(peek()) + "'");
    return take().value;
  }
  [[noreturn]] void error(const std::string& what, Fault fault = Fault::parse) { error_at(peek().line, what, fault); }
  [[noreturn]] void error_at(int line, const std::string& what, Fault fault = Fault::parse) {
    Verdict verdict(fault, what);
    verdict.line = line;
    if (line >= 1 && line <= static_cast<int>(lines_.size())) verdict.text = lines_[line - 1];
    throw verdict;
  }
  Type need_type() {
    if (peek().kind != Tok::dotted) error("expected a type, found '" + shown(peek()) + "'");
    Type type = parse_type(peek().text);
    if (type == Type::none) error("unknown type '." + peek().text + "'", Fault::unsupported);
    take();
    return type;
  }
  uint32_t need_alignment() {
    uint64_t alignment = need_integer("an alignment");
    if (alignment == 0 || (alignment & (alignment - 1)) || alignment > 65536) error("alignment must be a power of two");
    return static_cast<uint32_t>(alignment);
  }

  // ------------------------------------------------------------ module level
  void top_level() {
    if (accept(";")) return;
    if (peek().kind != Tok::dotted) error("expected a directive, found '" + shown(peek()) + "'");
    if (accept_dotted("version")) { take(); return; }
    if (accept_dotted("target")) {
      module_.target = need_name("a target");
      while (accept(",")) need_name("a target option");
      return;
    }
    if (accept_dotted("address_size")) {
      if (need_integer("an address size") != 64) error("only 64-bit addresses are known", Fault::unsupported);
      return;
    }
    if (accept_dotted("file")) { file_directive(); return; }
    if (accept_dotted("loc")) { loc_directive(); return; }
    if (accept_dotted("pragma")) { skip_to_semicolon(); return; }
    if (accept_dotted("section")) { skip_section(); return; }
    bool is_extern = false;
    for (;;) {
      if (accept_dotted("extern")) is_extern = true;
      else if (!(accept_dotted("visible") || accept_dotted("weak") || accept_dotted("common"))) break;
    }
    if (accept_dotted("entry")) { function(true); return; }
    if (accept_dotted("func")) { function(false); return; }
    for (auto [name, space] : {std::pair{"global", Space::global}, {"const", Space::constant}, {"shared", Space::shared_cta}}) {
      if (accept_dotted(name)) {
        module_variables(space, is_extern);
        return;
      }
    }
    error("unknown directive '." + peek().text + "'", Fault::unsupported);
  }

  void file_directive() {
    int index = static_cast<int>(need_integer("a file index"));
    if (peek().kind != Tok::string) error("expected a file name");
    module_.files[index] = take().text;
    while (accept(",")) take();
  }

  void loc_directive() {
    file_ = static_cast<int>(need_integer("a file index"));
    source_line_ = static_cast<int>(need_integer("a line"));
    need_integer("a column");
    // ", function_name label, inlined_at file line column" may follow, on the same line
    int line = tokens_[at_ - 1].line;
    while (peek().line == line && peek().kind != Tok::end) take();
  }

  void skip_to_semicolon() {
    while (peek().kind != Tok::end && !is(";")) take();
    expect(";");
  }

  void skip_section() {
    while (peek().kind != Tok::end && !is("{")) take();
    expect("{");
    for (int depth = 1; depth;) {
      if (peek().kind == Tok::end) error("section without an end");
      if (is("{")) ++depth;
      if (is("}")) --depth;
      take();
    }
  }

  /// After the state space: [.align n] .type name [dims] [= init] {, ...} ;
  std::vector<Variable> variable_list(Space space, bool is_extern) {
    uint32_t alignment = 0;
    std::vector<Variable> out;
    for (;;) {
      if (accept_dotted("align")) alignment = need_alignment();
      else if (accept_dotted("attribute")) { expect("("); while (!accept(")")) { if (peek().kind == Tok::end) error("expected ')'"); take(); } }
      else break;
    }
    int vector = accept_dotted("v2") ? 2 : accept_dotted("v4") ? 4 : 1;
    Type type = need_type();
    uint32_t element = type_bits(type) / 8;
    if (element == 0) error("a variable cannot be of type '." + std::string(type_name(type)) + "'");
    do {
      Variable variable;
      variable.space = space;
      variable.name = need_name("a variable name");
      uint64_t count = vector;
      bool unsized = false;
      while (accept("[")) {
        if (is("]")) unsized = true;
        else {
          uint64_t extent = need_integer("an array extent");
          if (extent && count > (1ull << 40) / extent) error("array too large");
          count *= extent;
        }
        expect("]");
      }
      if (accept("<")) {   // .local .b8 name<n>
        error("parametrised variable names are not known", Fault::unsupported);
      }
      variable.size = unsized ? 0 : count * element;
      variable.alignment = alignment ? alignment : element * vector;
      if (accept("=")) {
        initialiser(type, variable.init);
        if (unsized) variable.size = variable.init.size();
        if (variable.init.size() > variable.size) error("initialiser longer than variable '" + variable.name + "'");
        variable.init.resize(variable.size);
      } else if (unsized) {
        if (!(space == Space::shared_cta && is_extern)) error("unsized array '" + variable.name + "'", Fault::unsupported);
        variable.dynamic_shared = true;
      }
      out.push_back(std::move(variable));
    } while (accept(","));
    expect(";");
    return out;
  }

  void initialiser(Type type, std::vector<uint8_t>& out) {
    if (accept("{")) {
      while (!accept("}")) {
        initialiser(type, out);
        if (!is("}")) expect(",");
      }
      return;
    }
    bool minus = accept("-");
    if (peek().kind != Tok::number) error("only numbers can initialise a variable", Fault::unsupported);
    Token token = take();
    uint64_t value = literal_bits(token, type);
    if (minus) value = token.is_single || token.is_double ? value ^ (1ull << (type_bits(type) - 1)) : 0 - value;
    for (int i = 0; i < type_bits(type) / 8; ++i) out.push_back(static_cast<uint8_t>(value >> (8 * i)));
  }

  static uint64_t literal_bits(const Token& token, Type type) {
    if (token.is_double && type_bits(type) == 32) {
      double wide;
      std::memcpy(&wide, &token.value, 8);
      float narrow = static_cast<float>(wide);
      uint32_t bits;
      std::memcpy(&bits, &narrow, 4);
      return bits;
    }
    return token.value;
  }

  void module_variables(Space space, bool is_extern) {
    for (Variable& variable : variable_list(space, is_extern)) module_.variables.push_back(std::move(variable));
  }

  /// .param declarations in parentheses.
  std::vector<Parameter> parameter_list() {
    std::vector<Parameter> out;
    expect("(");
    if (accept(")")) return out;
    do {
      Parameter parameter;
      if (accept_dotted("reg")) error(".reg parameters are not known", Fault::unsupported);
      if (!accept_dotted("param")) error("expected .param, found '" + shown(peek()) + "'");
      uint32_t alignment = 0;
      for (;;) {
        if (accept_dotted("align")) alignment = need_alignment();
        else if (peek().kind == Tok::dotted && parse_type(peek().text) != Type::none && parameter.type == Type::none)
          parameter.type = need_type();
        else if (accept_dotted("ptr")) {
          for (const char* space : {"global", "shared", "const", "local", "param"})
            if (accept_dotted(space)) break;
          if (accept_dotted("align")) need_alignment();
        } else break;
      }
      if (parameter.type == Type::none) error("a parameter needs a type");
      parameter.name = need_name("a parameter name");
      uint32_t element = std::max(1, type_bits(parameter.type) / 8);
      uint64_t count = 1;
      while (accept("[")) {
        count *= is("]") ? 1 : need_integer("an array extent");
        if (count > (1u << 20)) error("parameter too large");
        expect("]");
      }
      parameter.size = static_cast<uint32_t>(element * count);
      parameter.alignment = alignment ? alignment : element;
      out.push_back(std::move(parameter));
    } while (accept(","));
    expect(")");
    return out;
  }

  void triple(std::array<uint32_t, 3>& out) {
    out = {1, 1, 1};
    for (int i = 0; i < 3; ++i) {
      out[i] = static_cast<uint32_t>(need_integer("an extent"));
      if (i == 2 || !accept(",")) break;
    }
  }

  void function(bool entry) {
    module_.functions.emplace_back();
    SyntaxFunction& f = module_.functions.back();
    function_ = &f;
    f.line = peek().line;
    f.info.is_entry = entry;
    if (!entry && is("(")) f.returns = parameter_list();
    f.info.name = need_name("a function name");
    if (is("(")) f.info.params = parameter_list();
    uint32_t offset = 0;
    for (Parameter& parameter : f.info.params) {
      offset = static_cast<uint32_t>(round_up(offset, parameter.alignment));
      parameter.offset = offset;
      offset += parameter.size;
    }
    f.info.param_bytes = offset;
    for (;;) {
      if (accept_dotted("reqntid")) triple(f.info.reqntid);
      else if (accept_dotted("maxntid")) triple(f.info.maxntid);
      else if (accept_dotted("reqnctapercluster")) triple(f.info.reqnctapercluster);
      else if (accept_dotted("minnctapersm")) f.info.minnctapersm = static_cast<uint32_t>(need_integer("a count"));
      else if (accept_dotted("maxnctapersm")) need_integer("a count");
      else if (accept_dotted("maxnreg")) f.info.maxnreg = static_cast<uint32_t>(need_integer("a count"));
      else if (accept_dotted("maxclusterrank")) f.info.maxclusterrank = static_cast<uint32_t>(need_integer("a count"));
      else if (accept_dotted("explicitcluster")) f.info.explicit_cluster = true;
      else if (accept_dotted("blocksareclusters")) error(".blocksareclusters is not known", Fault::unsupported);
      else if (accept_dotted("noreturn")) continue;
      else if (accept_dotted("unique")) continue;
      else if (accept_dotted("pragma")) skip_to_semicolon();
      else if (accept_dotted("abi_preserve") || accept_dotted("abi_preserve_control")) need_integer("a count");
      else break;
    }
    if (accept(";")) return;   // a prototype
    expect("{");
    f.has_body = true;
    file_ = source_line_ = 0;
    f.scopes.emplace_back();
    scope_ = 0;
    body(0);
    function_ = nullptr;
  }

  // ------------------------------------------------------------ function bodies
  void body(int depth) {
    if (depth > 200) error("braces nested too deeply");
    while (!accept("}")) {
      if (peek().kind == Tok::end) error("function without an end");
      if (accept(";")) continue;
      if (accept("{")) {
        int outer = scope_;
        function_->scopes.emplace_back();
        scope_ = static_cast<int>(function_->scopes.size()) - 1;
        function_->scopes[scope_].parent = outer;
        body(depth + 1);
        scope_ = outer;
        continue;
      }
      if (peek().kind == Tok::dotted) { body_directive(); continue; }
      if (peek().kind == Tok::name && is(":", 1)) { label(); continue; }
      statement();
    }
  }

  SyntaxScope& scope() { return function_->scopes[scope_]; }

  void label() {
    std::string name = take().text;
    expect(":");
    if (peek().kind == Tok::dotted && peek().text == "branchtargets") {
      take();
      std::vector<std::string>& targets = scope().tables[name];
      do targets.push_back(need_name("a label")); while (accept(","));
      expect(";");
      return;
    }
    if (peek().kind == Tok::dotted && (peek().text == "callprototype" || peek().text == "calltargets"))
      error("indirect calls are not known", Fault::unsupported);
    if (!scope().labels.emplace(name, static_cast<uint32_t>(function_->body.size())).second)
      error("label '" + name + "' defined twice");
  }

  void body_directive() {
    if (accept_dotted("reg")) { registers(); return; }
    if (accept_dotted("loc")) { loc_directive(); return; }
    if (accept_dotted("pragma")) { skip_to_semicolon(); return; }
    for (auto [name, space] : {std::pair{"shared", Space::shared_cta}, {"local", Space::local}, {"param", Space::param}}) {
      if (accept_dotted(name)) {
        for (Variable& variable : variable_list(space, false)) {
          scope().variables[variable.name] = function_->variables.size();
          function_->variables.push_back(std::move(variable));
        }
        return;
      }
    }
    error("unknown directive '." + peek().text + "'", Fault::unsupported);
  }

  void registers() {
    if (peek().kind == Tok::dotted && (peek().text == "v2" || peek().text == "v4"))
      error("vector registers are not known", Fault::unsupported);
    Type type = need_type();
    do {
      std::string name = need_name("a register name");
      uint32_t count = 1;
      bool family = false;
      if (accept("<")) {
        uint64_t n = need_integer("a count");
        if (n > 10'000'000) error("too many registers");
        count = static_cast<uint32_t>(n);
        expect(">");
        family = true;
      }
      Slot first = allocate(type, count);
      if (family) scope().families[name] = {first, count, type};
      else scope().registers[name] = {first, type};
    } while (accept(","));
    expect(";");
  }

  Slot allocate(Type type, uint32_t count) {
    uint64_t size = slot_bytes(type);
    uint64_t first = round_up(function_->info.register_bytes, std::min<uint64_t>(size, 64));
    if (first + size * count > 0x7fffffffu) error("too many registers");
    function_->info.register_bytes = static_cast<uint32_t>(first + size * count);
    return static_cast<Slot>(first);
  }

  bool find_register(const std::string& name, Operand& out) {
    size_t digits = name.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    for (int s = scope_; s >= 0; s = function_->scopes[s].parent) {
      const SyntaxScope& in = function_->scopes[s];
      if (auto it = in.registers.find(name); it != in.registers.end()) {
        fill(out, it->second.slot, it->second.type);
        return true;
      }
      if (digits < name.size() && name.size() - digits <= 8) {
        // "%r12": family "%r", number 12; the family's own name may end in digits too ("%r1<5>")
        for (size_t split = digits; split < name.size(); ++split) {
          auto it = in.families.find(name.substr(0, split));
          if (it == in.families.end()) continue;
          if (name[split] == '0' && split + 1 < name.size()) continue;
          uint64_t number = std::stoull(name.substr(split));
          if (number >= it->second.count) continue;
          fill(out, it->second.first + static_cast<Slot>(number * slot_bytes(it->second.type)), it->second.type);
          return true;
        }
      }
    }
    return false;
  }

  static void fill(Operand& out, Slot slot, Type type) {
    out.kind = Operand::Kind::reg;
    out.slot = slot;
    out.declared = type;
    out.bits = type_bits(type);
  }

  Operand name_operand() {
    Operand out;
    out.name = take().text;
    // %tid.x: a dotted part without space belongs to a special register
    while (peek().kind == Tok::dotted && peek().glued && out.name[0] == '%') out.name += "." + take().text;
    if (out.name == "_") { out.kind = Operand::Kind::sink; return out; }
    if (find_register(out.name, out)) return out;
    if (out.name == "WARP_SZ") {
      out.kind = Operand::Kind::literal;
      out.value = 32;
      return out;
    }
    out.kind = Operand::Kind::symbol;
    return out;
  }

  Operand literal_operand(bool minus) {
    Token token = take();
    Operand out;
    out.kind = Operand::Kind::literal;
    out.value = token.value;
    out.is_double = token.is_double;
    out.is_single = token.is_single;
    if (minus) {
      if (out.is_double) out.value ^= 1ull << 63;
      else if (out.is_single) out.value ^= 1u << 31;
      else out.value = 0 - out.value;
    }
    return out;
  }

  Operand operand(int depth = 0) {
    if (depth > 4) error("operands nested too deeply");
    if (accept("{")) return list("}", depth);
    if (accept("(")) return list(")", depth);
    if (accept("[")) return address_operand(depth);
    if (accept("!")) {
      Operand out = operand(depth + 1);
      out.negated = true;
      return out;
    }
    if (accept("-")) {
      if (peek().kind != Tok::number) error("expected a number after '-'");
      return literal_operand(true);
    }
    if (peek().kind == Tok::number) return literal_operand(false);
    if (peek().kind != Tok::name) error("expected an operand, found '" + shown(peek()) + "'");
    Operand out = name_operand();
    if (accept("|")) out.second.push_back(operand(depth + 1));
    if (out.kind == Operand::Kind::symbol && (is("+") || is("-")) ) {   // mov.u64 %rd, symbol+8
      bool minus = take().text == "-";
      int64_t value = static_cast<int64_t>(need_integer("an offset"));
      out.offset = minus ? -value : value;
    }
    return out;
  }

  Operand list(const char* end, int depth) {
    Operand out;
    out.kind = Operand::Kind::vector;
    if (accept(end)) return out;
    do out.items.push_back(operand(depth + 1)); while (accept(","));
    expect(end);
    return out;
  }

  Operand address_operand(int depth) {
    Operand out;
    out.kind = Operand::Kind::address;
    Operand base;
    if (peek().kind == Tok::number) base = literal_operand(false);
    else {
      if (peek().kind != Tok::name) error("expected an address, found '" + shown(peek()) + "'");
      base = name_operand();
    }
    out.items.push_back(base);
    while (is("+") || is("-")) {
      bool minus = take().text == "-";
      if (accept("-")) minus = !minus;
      int64_t value = static_cast<int64_t>(need_integer("an offset"));
      out.offset += minus ? -value : value;
    }
    while (accept(",")) out.items.push_back(operand(depth + 1));
    expect("]");
    return out;
  }

  void statement() {
    Statement out;
    out.scope = scope_;
    out.file = file_;
    out.source_line = source_line_;
    if (accept("@")) {
      bool negated = accept("!");
      if (peek().kind != Tok::name) error("expected a predicate, found '" + shown(peek()) + "'");
      out.predicate = name_operand();
      if (out.predicate.kind != Operand::Kind::reg || out.predicate.bits != 1)
        error("'" + out.predicate.name + "' is not a predicate register");
      out.predicate.negated = negated;
    }
    out.line = peek().line;
    out.opcode.push_back(need_name("an instruction"));
    while (peek().kind == Tok::dotted) out.opcode.push_back(take().text);
    out.mnemonic = out.opcode[0];
    for (size_t i = 1; i < out.opcode.size(); ++i) out.mnemonic += "." + out.opcode[i];
    if (!is(";")) {
      do out.operands.push_back(operand()); while (accept(","));
    }
    if (!is(";")) error("expected ';' after " + out.mnemonic + ", found '" + shown(peek()) + "'");
    take();
    function_->body.push_back(std::move(out));
  }

  std::vector<Token> tokens_;
  const std::vector<std::string>& lines_;
  size_t at_ = 0;
  SyntaxModule module_;
  SyntaxFunction* function_ = nullptr;
  int scope_ = 0;
  int file_ = 0, source_line_ = 0;
};

}  // namespace

Type parse_type(const std::string& name) {
  static const auto* map = [] {
    auto* out = new std::unordered_map<std::string, Type>;
    for (const TypeInfo& info : kTypes) (*out)[info.name] = info.type;
    return out;
  }();
  auto it = map->find(name);
  return it == map->end() ? Type::none : it->second;
}

const char* type_name(Type type) {
  for (const TypeInfo& info : kTypes)
    if (info.type == type) return info.name;
  return "none";
}

int type_bits(Type type) {
  for (const TypeInfo& info : kTypes)
    if (info.type == type) return info.bits;
  return 0;
}

bool is_float(Type type) { return type >= Type::f16 && type <= Type::f64; }

bool is_signed(Type type) {
  return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64 || type == Type::s16x2;
}

uint32_t slot_bytes(Type type) {
  int bits = type_bits(type);
  if (bits == 1) return 4;
  return bits <= 32 ? 128 : bits == 64 ? 256 : 512;
}

SyntaxModule parse_module(const std::string& text, const std::vector<std::string>& lines) {
  return Parser(Lexer(text, lines).run(), lines).run();
}

}  // namespace emu
