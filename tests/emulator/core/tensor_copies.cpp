#include "machine.h"

namespace ptx {

void add_tensor_copies(Decoders&) {}
void add_tcgen05(Decoders&) {}

}  // namespace ptx
