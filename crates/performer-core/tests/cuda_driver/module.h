// This follows a kernel's source that is compiled for the emulated device. It defines launches as
// the driver makes them, with addresses of arguments.

#include <tuple>
#include <utility>

namespace host {

template <class... Parameters, size_t... I>
void launch_with(Dim grid, int block_threads, void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    // The kernel gets as many bytes as its parameters have, whatever the caller had in mind.
    std::tuple<Parameters...> values;
    (std::memcpy(&std::get<I>(values), arguments[I], sizeof(Parameters)), ...);
    launch(grid, block_threads, kernel, std::get<I>(values)...);
}

template <class... Parameters>
void launch_with(Dim grid, int block_threads, void (*kernel)(Parameters...), void** arguments) {
    launch_with(grid, block_threads, kernel, arguments, std::index_sequence_for<Parameters...>());
}

}  // namespace host

#define LAUNCH(kernel)                                                                                                      \
    extern "C" __attribute__((visibility("default"))) void launch_##kernel(                                                 \
        unsigned x, unsigned y, int threads, size_t shared, int mode, void** arguments) {                                   \
        host::descending = mode & 1, host::truncating = mode & 2;                                                           \
        host::shared_bytes = shared;                                                                                        \
        host::launch_with({x, y, 1}, threads, kernel, arguments);                                                           \
    }
