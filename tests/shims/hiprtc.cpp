// SHIM of libhiprtc, for tests: "compiles" for an AMD GPU by building the kernels for the host. Written from
// hiprtc.h and its documentation.
#include <unistd.h>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include "device.h"
#include "hiprtc_abi.h"
#include "kernel_code.h"

namespace {

struct Program {
  std::string source, name, log, code;
};
shim::Handles<std::shared_ptr<Program>>& programs() {
  static auto* all = new shim::Handles<std::shared_ptr<Program>>;
  return *all;
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Runs the host's compiler in a folder of its own, and keeps what it has to say.
bool compile(Program& program, const std::filesystem::path& folder, const std::string& arguments) {
  const std::string command = "cd " + folder.string() + " && c++ -w " + arguments + " > log 2>&1";
  const bool good = system(command.c_str()) == 0;
  program.log = read(folder / "log");
  return good;
}

// The source, its macros expanded, between the prelude and a function for each kernel that binds its parameters.
std::string host_source(const std::string& expanded) {
  std::ostringstream out;
  out << "#include \"kernel_prelude.h\"\n" << expanded << "\n";
  static const std::regex kernel(R"(__global__[^;{]*?\b(\w+)\s*\([^()]*\)\s*\{)");
  for (std::sregex_iterator it(expanded.begin(), expanded.end(), kernel), end; it != end; ++it) {
    const std::string name = (*it)[1];
    out << "extern \"C\" shim::Bound* shim_bind_" << name << "(void** p) { return shim::bind_kernel(" << name << ", p); }\n";
  }
  return out.str();
}

}  // namespace

extern "C" {
hiprtcResult hiprtcVersion(int* major, int* minor) {
  *major = 7, *minor = 2;
  return HIPRTC_SUCCESS;
}
hiprtcResult hiprtcCreateProgram(hiprtcProgram* program, const char* source, const char* name, int headers,
                                 const char* const*, const char* const*) {
  if (!program || !source || headers) return HIPRTC_ERROR_INVALID_INPUT;
  auto made = std::make_shared<Program>();
  made->source = source;
  made->name = name ? name : "default_program";
  *program = (hiprtcProgram)programs().add(made);
  return HIPRTC_SUCCESS;
}
hiprtcResult hiprtcCompileProgram(hiprtcProgram handle, int count, const char* const* options) {
  auto program = programs().find(handle);
  if (!program) return HIPRTC_ERROR_INVALID_PROGRAM;
  std::string architecture, flags;
  for (int i = 0; i < count; i++) {
    const std::string option = options[i], target = "--offload-arch=";
    if (option.rfind(target + "gfx", 0) == 0) architecture = option.substr(target.size());
    else if (option == "-ffp-contract=off" || option == "-std=c++17") flags += " " + option;
    else return HIPRTC_ERROR_INVALID_OPTION;
  }
  if (architecture.empty() || architecture.size() >= sizeof(shim::CodeHeader::architecture)) return HIPRTC_ERROR_INVALID_OPTION;
  static std::atomic<int> compiled{0};
  const auto folder = std::filesystem::temp_directory_path() /
                      ("anyroll-shim-" + std::to_string(getpid()) + "-" + std::to_string(compiled++));
  if (!std::filesystem::create_directory(folder)) return HIPRTC_ERROR_INVALID_INPUT;
  std::ofstream(folder / "source.cpp") << "#line 1 \"" << program->name << "\"\n" << program->source << "\n";
  program->code.clear();
  bool good = compile(*program, folder, "-E -D__HIP_DEVICE_COMPILE__ -D__HIPCC__ source.cpp -o expanded.cpp");
  if (good) {
    std::ofstream(folder / "kernel.cpp") << host_source(read(folder / "expanded.cpp"));
    good = compile(*program, folder, "-O2 -U_FORTIFY_SOURCE -shared -fPIC" + flags + " -I" SHIM_FOLDER " kernel.cpp -o kernel.so");
  }
  if (good) {
    const std::string library = read(folder / "kernel.so");
    shim::CodeHeader header = {{'S', 'H', 'I', 'M', 'C', 'O', 'D', 'E'}, {}, library.size()};
    strcpy(header.architecture, architecture.c_str());
    program->code = std::string((char*)&header, sizeof header) + library;
  }
  std::filesystem::remove_all(folder);
  return good ? HIPRTC_SUCCESS : HIPRTC_ERROR_COMPILATION;
}
hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram handle, size_t* len) {
  auto program = programs().find(handle);
  if (!program) return HIPRTC_ERROR_INVALID_PROGRAM;
  *len = program->log.size() + 1;
  return HIPRTC_SUCCESS;
}
hiprtcResult hiprtcGetProgramLog(hiprtcProgram handle, char* text) {
  auto program = programs().find(handle);
  if (!program) return HIPRTC_ERROR_INVALID_PROGRAM;
  memcpy(text, program->log.c_str(), program->log.size() + 1);
  return HIPRTC_SUCCESS;
}
hiprtcResult hiprtcGetCodeSize(hiprtcProgram handle, size_t* len) {
  auto program = programs().find(handle);
  if (!program || program->code.empty()) return HIPRTC_ERROR_INVALID_PROGRAM;
  *len = program->code.size();
  return HIPRTC_SUCCESS;
}
hiprtcResult hiprtcGetCode(hiprtcProgram handle, char* code) {
  auto program = programs().find(handle);
  if (!program || program->code.empty()) return HIPRTC_ERROR_INVALID_PROGRAM;
  memcpy(code, program->code.data(), program->code.size());
  return HIPRTC_SUCCESS;
}
hiprtcResult hiprtcDestroyProgram(hiprtcProgram* handle) {
  if (!handle || !programs().remove(*handle)) return HIPRTC_ERROR_INVALID_PROGRAM;
  *handle = nullptr;
  return HIPRTC_SUCCESS;
}
const char* hiprtcGetErrorString(hiprtcResult result) { return result == HIPRTC_SUCCESS ? "HIPRTC_SUCCESS" : "HIPRTC_ERROR"; }
}
