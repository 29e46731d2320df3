// Candle's own kernels by their names, as far as this project uses them: copies, casts, elementwise
// operations, sums and indexing. Numbers are computed in f64 and rounded when they are stored.

#include "driver.h"

#include "device.h"

#include <cstdint>
#include <map>

enum Type { F32, F64, BF16, F16, U8, U32, I16, I32, I64 };
static const std::map<std::string, Type> TYPES = {{"f32", F32}, {"f64", F64}, {"bf16", BF16}, {"f16", F16}, {"u8", U8},
                                                  {"u32", U32}, {"i16", I16}, {"i32", I32},   {"i64", I64}};

static double load(Type type, const void* at, size_t i) {
    switch (type) {
        case F32: return ((const float*)at)[i];
        case F64: return ((const double*)at)[i];
        case BF16: return widen(((const Bfloat*)at)[i]);
        case F16: return widen(((const Half*)at)[i]);
        case U8: return ((const uint8_t*)at)[i];
        case U32: return ((const uint32_t*)at)[i];
        case I16: return ((const int16_t*)at)[i];
        case I32: return ((const int32_t*)at)[i];
        case I64: return (double)((const int64_t*)at)[i];
    }
    return 0;
}

static void store(Type type, void* at, size_t i, double x) {
    switch (type) {
        case F32: ((float*)at)[i] = (float)x; break;
        case F64: ((double*)at)[i] = x; break;
        case BF16: narrow((float)x, ((Bfloat*)at)[i]); break;
        case F16: narrow((float)x, ((Half*)at)[i]); break;
        case U8: ((uint8_t*)at)[i] = (uint8_t)x; break;
        case U32: ((uint32_t*)at)[i] = (uint32_t)x; break;
        case I16: ((int16_t*)at)[i] = (int16_t)x; break;
        case I32: ((int32_t*)at)[i] = (int32_t)x; break;
        case I64: ((int64_t*)at)[i] = (int64_t)x; break;
    }
}

// Name is a kernel's name taken apart: what the kernel does, and the types at the end.
struct Name {
    std::string what;
    Type type = F32, other = F32;
    bool known = true;
};

static bool take_type(std::string& name, Type& type) {
    size_t line = name.rfind('_');
    auto found = line == std::string::npos ? TYPES.end() : TYPES.find(name.substr(line + 1));
    if (found == TYPES.end()) return false;
    type = found->second;
    name.resize(line);
    return true;
}

static Name parse(const std::string& name) {
    Name parsed{name};
    parsed.known = take_type(parsed.what, parsed.type);
    // This covers cast_FROM_TO, and the type of indices or conditions in front of that of numbers.
    take_type(parsed.what, parsed.other);
    return parsed;
}

typedef double (*Unary)(double);
static const std::map<std::string, Unary> UNARY = {
    {"ucopy", [](double x) { return x; }},
    {"cast", [](double x) { return x; }},
    {"uneg", [](double x) { return -x; }},
    {"uexp", [](double x) { return std::exp(x); }},
    {"ulog", [](double x) { return std::log(x); }},
    {"usqr", [](double x) { return x * x; }},
    {"usqrt", [](double x) { return std::sqrt(x); }},
    {"urecip", [](double x) { return 1 / x; }},
    {"uabs", [](double x) { return std::fabs(x); }},
    {"urelu", [](double x) { return x > 0 ? x : 0; }},
    {"utanh", [](double x) { return std::tanh(x); }},
    {"uerf", [](double x) { return std::erf(x); }},
    {"ucos", [](double x) { return std::cos(x); }},
    {"usin", [](double x) { return std::sin(x); }},
    {"usilu", [](double x) { return x / (1 + std::exp(-x)); }},
    {"ugelu_erf", [](double x) { return x * (1 + std::erf(x / std::sqrt(2))) / 2; }},
};

typedef double (*Binary)(double, double);
static const std::map<std::string, Binary> BINARY = {
    {"badd", [](double x, double y) { return x + y; }},
    {"bsub", [](double x, double y) { return x - y; }},
    {"bmul", [](double x, double y) { return x * y; }},
    {"bdiv", [](double x, double y) { return x / y; }},
    {"bmaximum", [](double x, double y) { return x > y ? x : y; }},
    {"bminimum", [](double x, double y) { return x < y ? x : y; }},
};
static const std::map<std::string, Binary> COMPARE = {
    {"eq", [](double x, double y) { return (double)(x == y); }}, {"ne", [](double x, double y) { return (double)(x != y); }},
    {"lt", [](double x, double y) { return (double)(x < y); }},  {"le", [](double x, double y) { return (double)(x <= y); }},
    {"gt", [](double x, double y) { return (double)(x > y); }},  {"ge", [](double x, double y) { return (double)(x >= y); }},
};

enum Fold { SUM, MAX, MIN };
static const std::map<std::string, Fold> FOLDS = {{"fast_sum", SUM}, {"fast_sum_small", SUM}, {"fast_max", MAX}, {"fast_min", MIN}};

bool candle_knows(const std::string& name) {
    Name parsed = parse(name);
    const std::string& what = parsed.what;
    if (!parsed.known) return false;
    for (const char* other : {"affine", "fill", "const_set", "copy2d", "where", "is", "ia"}) {
        if (what == other) return true;
    }
    return UNARY.count(what) || BINARY.count(what) || COMPARE.count(what) || FOLDS.count(what);
}

// Arguments reads a kernel's arguments one after the other.
struct Arguments {
    void** next;
    template <class T>
    T take() {
        T value;
        std::memcpy(&value, *next++, sizeof(T));
        return value;
    }
    size_t count() { return take<size_t>(); }
    char* address() { return take<char*>(); }
    double number(Type type) { return load(type, *next++, 0); }
};

// Places computes where a number lies from dimensions, then strides of `operand`; they are absent
// where all is contiguous.
struct Places {
    size_t dims;
    const size_t* info;
    size_t at(size_t i, int operand = 0) const {
        if (!info) return i;
        size_t place = 0;
        for (size_t d = dims; d-- > 0;) {
            place += i % info[d] * info[dims * (1 + operand) + d];
            i /= info[d];
        }
        return place;
    }
};

static Places places(Arguments& arguments) {
    size_t dims = arguments.count();
    return {dims, (const size_t*)arguments.address()};
}

// Runs an elementwise kernel.
static void elementwise(const Name& name, Arguments arguments) {
    size_t count = arguments.count();
    Places at = places(arguments);
    auto unary = UNARY.find(name.what);
    auto binary = BINARY.find(name.what), compare = COMPARE.find(name.what);
    if (unary != UNARY.end()) {
        const char* from = arguments.address();
        char* to = arguments.address();
        Type type = name.what == "cast" ? name.other : name.type;
        for (size_t i = 0; i < count; i++) store(name.type, to, i, unary->second(load(type, from, at.at(i))));
    } else if (name.what == "affine") {
        const char* from = arguments.address();
        char* to = arguments.address();
        double factor = arguments.number(name.type), term = arguments.number(name.type);
        for (size_t i = 0; i < count; i++) store(name.type, to, i, load(name.type, from, at.at(i)) * factor + term);
    } else if (name.what == "const_set") {
        double value = arguments.number(name.type);
        char* to = arguments.address();
        for (size_t i = 0; i < count; i++) store(name.type, to, at.at(i), value);
    } else if (name.what == "where") {
        const char *condition = arguments.address(), *yes = arguments.address(), *no = arguments.address();
        char* to = arguments.address();
        for (size_t i = 0; i < count; i++) {
            bool holds = load(name.other, condition, at.at(i)) != 0;
            store(name.type, to, i, holds ? load(name.type, yes, at.at(i, 1)) : load(name.type, no, at.at(i, 2)));
        }
    } else {
        const char *left = arguments.address(), *right = arguments.address();
        char* to = arguments.address();
        Binary f = binary != BINARY.end() ? binary->second : compare->second;
        for (size_t i = 0; i < count; i++) {
            double x = f(load(name.type, left, at.at(i)), load(name.type, right, at.at(i, 1)));
            store(binary != BINARY.end() ? name.type : U8, to, i, x);
        }
    }
}

// Runs a sum, maximum or minimum over the numbers of each row.
static void fold(const Name& name, Arguments arguments) {
    size_t count = arguments.count(), of_each = arguments.count();
    if (name.what != "fast_sum_small") count /= of_each;
    Places at = places(arguments);
    const char* from = arguments.address();
    char* to = arguments.address();
    Fold how = FOLDS.at(name.what);
    for (size_t i = 0; i < count; i++) {
        double all = how == SUM ? 0 : how == MAX ? -INFINITY : INFINITY;
        for (size_t j = i * of_each; j < (i + 1) * of_each; j++) {
            double x = load(name.type, from, at.at(j));
            all = how == SUM ? all + x : how == MAX ? std::max(all, x) : std::min(all, x);
        }
        store(name.type, to, i, all);
    }
}

static void index_select(const Name& name, Arguments arguments) {
    arguments.count();
    Places at = places(arguments);
    const char *ids = arguments.address(), *from = arguments.address();
    char* to = arguments.address();
    size_t left = arguments.count(), rows = arguments.count(), count = arguments.count(), right = arguments.count();
    for (size_t i = 0; i < left * count * right; i++) {
        size_t row = (size_t)load(name.other, ids, at.at(i / right % count));
        if (row >= rows) give_up("index " + std::to_string(row) + " of " + std::to_string(rows));
        store(name.type, to, i, load(name.type, from, (i / right / count * rows + row) * right + i % right));
    }
}

static void index_add(const Name& name, Arguments arguments) {
    const char* ids = arguments.address();
    size_t count = arguments.count();
    const char* from = arguments.address();
    char* to = arguments.address();
    size_t left = arguments.count(), from_rows = arguments.count(), to_rows = arguments.count(), right = arguments.count();
    for (size_t i = 0; i < left; i++) {
        for (size_t j = 0; j < count; j++) {
            size_t row = (size_t)load(name.other, ids, j);
            for (size_t k = 0; k < right; k++) {
                size_t sum = (i * to_rows + row) * right + k;
                store(name.type, to, sum, load(name.type, to, sum) + load(name.type, from, (i * from_rows + j) * right + k));
            }
        }
    }
}

static void copy_rows(const Name& name, Arguments arguments) {
    const char* from = arguments.address();
    char* to = arguments.address();
    uint32_t rows = arguments.take<uint32_t>(), columns = arguments.take<uint32_t>();
    uint32_t from_stride = arguments.take<uint32_t>(), to_stride = arguments.take<uint32_t>();
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < columns; j++) store(name.type, to, i * to_stride + j, load(name.type, from, i * from_stride + j));
    }
}

static void fill(const Name& name, Arguments arguments) {
    char* to = arguments.address();
    double value = arguments.number(name.type);
    for (size_t i = 0, count = arguments.count(); i < count; i++) store(name.type, to, i, value);
}

void candle_run(const std::string& full_name, void** arguments) {
    Name name = parse(full_name);
    if (FOLDS.count(name.what)) return fold(name, {arguments});
    if (name.what == "is") return index_select(name, {arguments});
    if (name.what == "ia") return index_add(name, {arguments});
    if (name.what == "copy2d") return copy_rows(name, {arguments});
    if (name.what == "fill") return fill(name, {arguments});
    elementwise(name, {arguments});
}
