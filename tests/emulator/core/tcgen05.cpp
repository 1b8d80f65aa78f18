#include "machine.h"

namespace ptx {

void add_tcgen05(Decoders&) {}

}  // namespace ptx
