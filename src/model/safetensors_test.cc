#include "model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "model/testing.h"

namespace fathom {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A file of `header` and `payload` bytes counting up.
std::string FileOf(const std::string& header, size_t payload) {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  file += header;
  for (size_t i = 0; i < payload; ++i) file += static_cast<char>(i);
  return file;
}

Expected<std::vector<TensorInfo>> Parse(const std::string& file) {
  return ParseSafeTensors(std::as_bytes(std::span(file)), "f.safetensors");
}

// The message of the refusal of a file with this header.
std::string Refusal(const std::string& header, size_t payload) {
  const std::string file = FileOf(header, payload);
  const auto parsed = Parse(file);
  EXPECT_FALSE(parsed) << header;
  if (parsed) return "";
  EXPECT_EQ(parsed.error().code, Code::kDataLoss);
  EXPECT_THAT(parsed.error().message, HasSubstr("f.safetensors"));
  return parsed.error().message;
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return fmt::format("\"{}\":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":{}}}", name, dtype,
                     shape, offsets);
}

TEST(SafeTensors, ReadsNamesShapesAndBytes) {
  const std::string file = FileOf(
      "{\"__metadata__\":{\"format\":\"pt\"}," + Entry("b", "F16", "[2,1]", "[4,8]") + "," +
          Entry("a", "F32", "[]", "[0,4]") + "," + Entry("empty", "I64", "[0,7]", "[8,8]") + "}  ",
      8);
  const auto tensors = Parse(file);
  ASSERT_TRUE(tensors) << tensors.error().message;
  ASSERT_EQ(tensors->size(), 3u);
  EXPECT_EQ((*tensors)[0].name, "a");
  EXPECT_TRUE((*tensors)[0].shape.empty());
  EXPECT_EQ((*tensors)[1].dtype, DType::kF16);
  EXPECT_EQ((*tensors)[1].shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(std::to_integer<int>((*tensors)[1].data[0]), 4);
  EXPECT_EQ((*tensors)[2].bytes, 0);
}

TEST(SafeTensors, RefusesBrokenHeaders) {
  EXPECT_THAT(Refusal("", 0), HasSubstr("does not begin"));
  EXPECT_THAT(Refusal("[]", 0), HasSubstr("does not begin"));
  EXPECT_THAT(Refusal("{", 0), HasSubstr("not valid JSON"));
  EXPECT_THAT(Refusal("{} x", 0), HasSubstr("not valid JSON"));
  EXPECT_THAT(Refusal("{\"__metadata__\":{\"a\":1}}", 0), HasSubstr("__metadata__"));
  EXPECT_THAT(Refusal("{\"__metadata__\":[]}", 0), HasSubstr("__metadata__"));
  EXPECT_THAT(Refusal("{" + Entry("a", "F32", "[1]", "[0,4]") + "," +
                          Entry("a", "F32", "[1]", "[4,8]") + "}",
                      8),
              HasSubstr("duplicate key \"a\""));
  std::string too_long = FileOf("{}", 0);
  too_long[0] = 3;
  EXPECT_THAT(Parse(too_long).error().message, HasSubstr("header of 3 bytes in a file of 10"));
  too_long[7] = '\xff';
  EXPECT_FALSE(Parse(too_long));
}

TEST(SafeTensors, RefusesBrokenEntriesByTensorName) {
  const auto refusal = [](const std::string& entry, size_t payload = 16) {
    return Refusal("{" + entry + "}", payload);
  };
  EXPECT_THAT(refusal("\"t\":7"), AllOf(HasSubstr("tensor t"), HasSubstr("not an object")));
  EXPECT_THAT(refusal("\"t\":{\"dtype\":\"F32\",\"shape\":[4]}"),
              HasSubstr("data_offsets is missing"));
  EXPECT_THAT(refusal("\"t\":{\"dtype\":\"F32\",\"data_offsets\":[0,16]}"),
              HasSubstr("shape is missing"));
  EXPECT_THAT(refusal("\"t\":{\"shape\":[4],\"data_offsets\":[0,16]}"),
              HasSubstr("dtype is missing"));
  EXPECT_THAT(refusal("\"t\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16],\"x\":1}"),
              HasSubstr("unknown header field \"x\""));
  EXPECT_THAT(refusal("\"t\":{\"dtype\":4,\"shape\":[4],\"data_offsets\":[0,16]}"),
              HasSubstr("dtype is not a string"));
  EXPECT_THAT(refusal(Entry("t", "F64", "[2]", "[0,16]")), HasSubstr("\"F64\" is not supported"));
  EXPECT_THAT(refusal(Entry("", "F32", "[4]", "[0,16]")), HasSubstr("empty name"));
  for (const char* shape : {"4", "[-4]", "[4.0]", "[\"4\"]", "[null]", "[1,1,1,1,1,1,1,1,4]",
                            "[18446744073709551615]", "[99999999999999999999999]"}) {
    EXPECT_THAT(refusal(Entry("t", "F32", shape, "[0,16]")), HasSubstr("tensor t: shape"));
  }
  EXPECT_THAT(refusal(Entry("t", "F32", "[4294967296,4294967296]", "[0,16]")),
              HasSubstr("overflows"));
  EXPECT_THAT(refusal(Entry("t", "F32", "[4611686018427387905]", "[0,4]")), HasSubstr("overflows"));
  for (const char* offsets : {"16", "[0]", "[0,16,32]", "[16,0]", "[-1,15]", "[0,16.0]",
                              "[0,18446744073709551615]", "[null,16]"}) {
    EXPECT_THAT(refusal(Entry("t", "F32", "[4]", offsets)), HasSubstr("tensor t: data_offsets"));
  }
  EXPECT_THAT(refusal(Entry("t", "F32", "[4]", "[0,12]")),
              HasSubstr("span 12 bytes, F32 [4] needs 16"));
  EXPECT_THAT(refusal(Entry("t", "F32", "[4]", "[0,16]"), 12), HasSubstr("truncated"));
}

TEST(SafeTensors, TensorsMustTileThePayload) {
  const std::string a = Entry("a", "I8", "[8]", "[0,8]");
  EXPECT_THAT(Refusal("{" + a + "," + Entry("b", "I8", "[8]", "[4,12]") + "}", 12),
              HasSubstr("tensor b: overlaps tensor a"));
  EXPECT_THAT(Refusal("{" + a + "," + Entry("b", "I8", "[8]", "[0,8]") + "}", 8),
              HasSubstr("overlaps"));
  EXPECT_THAT(Refusal("{" + a + "," + Entry("b", "I8", "[8]", "[9,17]") + "}", 17),
              HasSubstr("tensor b: 1 unused bytes in front"));
  EXPECT_THAT(Refusal("{" + Entry("b", "I8", "[8]", "[1,9]") + "}", 9), HasSubstr("unused"));
  EXPECT_THAT(Refusal("{" + a + "}", 9), HasSubstr("1 bytes after the last tensor"));
}

TEST(SafeTensors, EveryTruncationOfAFileIsRefused) {
  testing::TemporaryDirectory dir;
  testing::WriteTensors(dir / "x", testing::MakeTensors(testing::TinyConfig()));
  const std::string whole = testing::ReadAll(dir / "x");
  ASSERT_TRUE(Parse(whole));
  const size_t step = whole.size() / 400 + 1;
  for (size_t n = 0; n < whole.size(); n += n < 64 || n + 64 > whole.size() ? 1 : step) {
    EXPECT_FALSE(Parse(whole.substr(0, n))) << n;
  }
}

RC_GTEST_PROP(SafeTensors, WhatIsWrittenIsReadBack, ()) {
  const auto dtypes = std::vector{DType::kF32,    DType::kF16, DType::kBF16, DType::kF8E4M3,
                                  DType::kF8E8M0, DType::kI8,  DType::kI32,  DType::kI64};
  testing::TensorsByName tensors;
  for (const auto& name : *rc::gen::container<std::vector<std::string>>(
           rc::gen::nonEmpty(rc::gen::string<std::string>()))) {
    testing::OwnedTensor& t = tensors["t" + std::to_string(tensors.size())];
    t.dtype = *rc::gen::elementOf(dtypes);
    t.shape = {*rc::gen::inRange<int64_t>(0, 5), *rc::gen::inRange<int64_t>(1, 7)};
    t.data.assign(static_cast<size_t>(t.shape[0] * t.shape[1] * ElementBytes(t.dtype)), name[0]);
  }
  testing::TemporaryDirectory dir;
  testing::WriteTensors(dir / "x", tensors);
  const auto file = SafeTensorsFile::Open(dir / "x");
  RC_ASSERT(file.has_value());
  RC_ASSERT(file->tensors().size() == tensors.size());
  for (const auto& [name, t] : tensors) {
    const TensorInfo* info = file->Find(name);
    RC_ASSERT(info != nullptr);
    RC_ASSERT(info->dtype == t.dtype && info->shape == t.shape);
    RC_ASSERT(reinterpret_cast<uintptr_t>(info->data) % ElementBytes(t.dtype) == 0);
    RC_ASSERT(std::string(reinterpret_cast<const char*>(info->data), info->bytes) == t.data);
  }
}

TEST(SafeTensorsWriter, RefusesBadNamesAndShapesAndLeavesNoFile) {
  testing::TemporaryDirectory dir;
  const float value = 1;
  const auto write = [&](std::vector<TensorToWrite> tensors) {
    const Status status = WriteSafeTensors(dir / "x", tensors);
    EXPECT_FALSE(status);
    EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
    return status ? Code::kInternal : status.error().code;
  };
  EXPECT_EQ(write({{"", DType::kF32, {1}, &value}}), Code::kInvalidArgument);
  EXPECT_EQ(write({{"__metadata__", DType::kF32, {1}, &value}}), Code::kInvalidArgument);
  EXPECT_EQ(write({{"\xff", DType::kF32, {1}, &value}}), Code::kInvalidArgument);
  EXPECT_EQ(write({{"a", DType::kF32, {-1}, &value}}), Code::kInvalidArgument);
  EXPECT_EQ(write({{"a", DType::kF32, {1}, &value}, {"a", DType::kF32, {1}, &value}}),
            Code::kInvalidArgument);
}

TEST(SafeTensorsWriter, AFailedWriteKeepsTheOldFile) {
  testing::TemporaryDirectory dir;
  const float value = 1;
  const std::vector<TensorToWrite> tensors = {{"a", DType::kF32, {1}, &value}};
  const Status nowhere = WriteSafeTensors(dir / "no/x", tensors);
  ASSERT_FALSE(nowhere);
  EXPECT_THAT(nowhere.error().message, HasSubstr("no/x"));
  // The rename onto a directory that is not empty fails after the whole file was written.
  std::filesystem::create_directories(dir / "taken/inside");
  EXPECT_FALSE(WriteSafeTensors(dir / "taken", tensors));
  EXPECT_TRUE(std::filesystem::exists(dir / "taken/inside"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

TEST(SafeTensorsFile, NamesThePathOfAMissingOrUnusableFile) {
  testing::TemporaryDirectory dir;
  EXPECT_EQ(SafeTensorsFile::Open(dir / "none").error().code, Code::kNotFound);
  EXPECT_EQ(SafeTensorsFile::Open(dir.path()).error().code, Code::kDataLoss);
  testing::WriteAll(dir / "empty", "");
  const auto empty = SafeTensorsFile::Open(dir / "empty");
  ASSERT_FALSE(empty);
  EXPECT_THAT(empty.error().message, HasSubstr(dir / "empty"));
}

TEST(SafeTensorsFile, ReadsTheReferenceOutputs) {
  const auto file = SafeTensorsFile::Open(testing::SharedPath("models/demo/golden.safetensors"));
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_FALSE(file->tensors().empty());
  EXPECT_TRUE(SafeTensorsFile::Open(testing::SharedPath("models/demo/steps.safetensors")));
  EXPECT_TRUE(SafeTensorsFile::Open(testing::SharedPath("models/random-pro/golden.safetensors")));
}

}  // namespace
}  // namespace fathom
