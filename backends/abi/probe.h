// Prints what a vendor's header says, a fact a line. Registers and sizes are what a call depends on, so a parameter is
// its class (i for integers, enums and pointers, f for floats, s for structs by value) and its bytes.
#include <cstddef>
#include <cstdio>
#include <type_traits>

template <typename T>
void print_class() {
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_class_v<T> || std::is_union_v<T> ? 's' : 'i';
  printf(" %c%zu", kind, sizeof(T));
}
template <typename R, typename... A>
void function(const char* name, R (*)(A...)) {
  printf("fn %s", name);
  print_class<R>();
  (print_class<A>(), ...);
  printf("\n");
}
#define SIZE(type) printf("size %s %zu\n", #type, sizeof(type))
#define OFFSET(type, field) printf("offset %s.%s %zu\n", #type, #field, offsetof(type, field))
#define VALUE(name) printf("value %s %lld\n", #name, (long long)(name))
