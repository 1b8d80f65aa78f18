// The traits of all forms. They are compiled once, for the lowest instruction set.
#include "../forms.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "forms/list.h"

namespace bfa {
namespace {

using BFA_KERNELS::FormList;
using BFA_KERNELS::Forms;

struct Table {
    FormTraits entries[Forms::kCount];
};

template <class... Form>
constexpr Table table_of(FormList<Form...>) {
    Table table = {{Form::traits...}};
    for (int n = 0; n < Forms::kCount; ++n) table.entries[n].index = n;
    return table;
}

constexpr Table kTable = table_of(Forms());

}  // namespace

const FormTraits& find_form(const char* name) {
    std::string known;
    for (const FormTraits& form : kTable.entries) {
        if (std::strcmp(name, form.name) == 0) return form;
        known += std::string(known.empty() ? "" : ", ") + form.name;
    }
    throw std::invalid_argument("form is " + std::string(name) + "; it may be one of " + known);
}

}  // namespace bfa
