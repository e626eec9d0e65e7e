#!/usr/bin/env python3
"""Turns a preprocessed CUDA source into C++ for the emulator (README.md).

rewrite.py IN OUT: what comes from files of the project is rewritten, line by line numbers kept:
  asm("ptx" : "=r"(x) : "r"(y))      -> a call of emu::Execute
  kernel<<<grid, block, ...>>>(args)  -> emu::RunCall
  cudaLaunchKernelEx                  -> emu::LaunchKernelEx
  [extern] __shared__ T name[..];     -> a reference to the block's memory
"""
import re
import sys

IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def skip_string(text, i):
    """The index after the string or character literal that begins at i."""
    quote = text[i]
    i += 1
    while text[i] != quote:
        i += 2 if text[i] == "\\" else 1
    return i + 1


def matching(text, i):
    """The index after the bracket that closes the one at i."""
    depth = 0
    while True:
        c = text[i]
        if c in "\"'" and not (c == "'" and text[i - 1].isalnum()):
            i = skip_string(text, i)
            continue
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1


def split(text, separator):
    """Pieces between separators outside brackets and strings."""
    pieces, begin, i = [], 0, 0
    while i < len(text):
        c = text[i]
        if c in "\"'" and not (c == "'" and i and text[i - 1].isalnum()):
            i = skip_string(text, i)
            continue
        if c in "([{":
            i = matching(text, i)
            continue
        if c == separator:
            pieces.append(text[begin:i])
            begin = i + 1
        i += 1
    return pieces + [text[begin:]]


def split_angles(text):
    """Arguments of a configuration: commas outside every bracket, angle brackets too."""
    pieces, begin, depth = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif c == "," and depth == 0:
            pieces.append(text[begin:i])
            begin = i + 1
    return pieces + [text[begin:]]


STRINGS = re.compile(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')


def operands(section, out):
    result = []
    if not section.strip():
        return result
    for item in split(section, ","):
        match = STRINGS.match(item)
        constraint = re.sub(r'["\s=+&]', "", match.group(1))
        value = item[match.end():].strip()
        value = value[1:matching(value, 0) - 1].strip()
        kind = "Out" if out else "In"
        if out and "+" in match.group(1):
            kind = "Out"
        result.append(f"::emu::{kind}<'{constraint}'>({value})")
    return result


def rewrite_asm(text, begin, i, file, line):
    """The asm statement whose '(' is at i."""
    end = matching(text, i)
    body = text[i + 1:end - 1]
    newlines = "\n" * body.count("\n")
    body = body.replace("\n", " ")
    sections = split(body, ":")
    template = STRINGS.match(sections[0]).group(1).strip()
    if not re.sub(r'["\s]', "", template):
        return end, "do { } while (0)" + newlines
    outs = operands(sections[1], True) if len(sections) > 1 else []
    ins = operands(sections[2], False) if len(sections) > 2 else []
    listed = ", ".join(outs + ins) or "::emu::Operand{}"
    return end, (f"do {{ static const ::emu::Code* const emu_code = ::emu::Compile({template}, "
                 f"\"{file}\", {line}); const ::emu::Operand emu_operands[] = {{{listed}}}; "
                 f"::emu::Execute(emu_code, emu_operands); }} while (0)" + newlines)


def rewrite_launch(text, at):
    """kernel<<<...>>>(...) whose <<< is at `at`; returns begin, end, replacement."""
    begin = at
    while text[begin - 1].isspace():
        begin -= 1
    if text[begin - 1] == ">":  # template arguments
        depth = 0
        while True:
            begin -= 1
            depth += {">": 1, "<": -1}.get(text[begin], 0)
            if depth == 0:
                break
    while re.match(r"[\w:]", text[begin - 1]):
        begin -= 1
    kernel = text[begin:at].strip()
    close = text.index(">>>", at)
    config = ", ".join(piece.strip() for piece in split_angles(text[at + 3:close]))
    arguments = text.index("(", close)
    end = matching(text, arguments)
    name = re.sub(r"\s+", " ", kernel)
    call = f"{kernel}{text[arguments:end]}"
    newlines = "\n" * (text[begin:end].count("\n") - call.count("\n"))
    return begin, end, (f"::emu::RunCall(::emu::Configuration({config}), \"{name}\", [=] "
                        f"{{ {call}; }})" + newlines)


ATTRIBUTE = re.compile(r"\s*(?:alignas\s*\((?P<a>[^()]*)\)|"
                       r"__attribute__\s*\(\(\s*aligned\s*\((?P<b>[^()]*)\)\s*\)\))")
shared_declarations = 0


def rewrite_shared(text, begin, end):
    """A declaration with emu_shared, text[begin:end] with its semicolon."""
    global shared_declarations
    body = text[begin:end - 1]
    newlines = "\n" * body.count("\n")
    words = body.replace("\n", " ")
    is_extern = re.search(r"\bextern\b", words) is not None
    words = re.sub(r"\b(extern|static|emu_shared)\b", " ", words)
    alignment = "1"
    while True:
        match = ATTRIBUTE.search(words)
        if not match:
            break
        alignment = match.group("a") or match.group("b")
        words = words[:match.start()] + " " + words[match.end():]
    match = re.match(r"\s*(?P<type>.*?[\s>])(?P<name>\w+)\s*(?P<dims>(?:\[.*\])?)\s*$", words)
    kind, name, dims = match.group("type").strip(), match.group("name"), match.group("dims")
    if is_extern:
        return f"{kind}* const {name} = static_cast<{kind}*>(::emu::DynamicShared());" + newlines
    shared_declarations += 1
    return (f"typedef {kind} emu_{name}_t {dims}; emu_{name}_t& {name} = "
            f"*static_cast<emu_{name}_t*>(::emu::StaticShared({shared_declarations}, "
            f"sizeof(emu_{name}_t), std::max<size_t>(alignof(emu_{name}_t), {alignment})));" +
            newlines)


def rewrite(text, file, line):
    """One stretch of a file of the project."""
    out, i = [], 0
    done = 0  # what of text is in out

    def line_at(index):
        return line + text.count("\n", 0, index)

    while i < len(text):
        c = text[i]
        if c == "\n" and text.startswith("\n#", i):  # pragma
            i = text.find("\n", i + 1)
            if i < 0:
                break
            continue
        if c in "\"'" and not (c == "'" and i and text[i - 1].isalnum()):
            i = skip_string(text, i)
            continue
        if text.startswith("<<<", i):
            begin, end, replacement = rewrite_launch(text, i)
            out += [text[done:begin], replacement]
            done = i = end
            continue
        match = IDENTIFIER.match(text, i)
        if not match:
            i += 1
            while i < len(text) and c.isdigit() and (text[i].isalnum() or text[i] in "'."):
                i += 1
            continue
        word = match.group()
        if word in ("asm", "__asm__"):
            at = match.end()
            volatile = re.compile(r"\s*(?:volatile|__volatile__)?\s*").match(text, at)
            if text[volatile.end()] == "(":
                end, replacement = rewrite_asm(text, i, volatile.end(), file, line_at(i))
                out += [text[done:i], replacement]
                done = i = end
                continue
        elif word == "cudaLaunchKernelEx":
            out += [text[done:i], "::emu::LaunchKernelEx"]
            done = i = match.end()
            continue
        elif word == "emu_shared":
            begin = i
            before = re.search(r"(?:extern|static)\s+$", text[:i])
            if before:
                begin = before.start()
            end = text.index(";", i) + 1
            out += [text[done:begin], rewrite_shared(text, begin, end)]
            done = i = end
            continue
        i = match.end()
    out.append(text[done:])
    return "".join(out)


def main():
    source = open(sys.argv[1], encoding="utf-8").read()
    marker = re.compile(r'^# (\d+) "([^"]*)"[^\n]*\n', re.M)
    out, at = [], 0
    pieces = []  # (marker text, file, line, text)
    matches = list(marker.finditer(source))
    out.append(source[:matches[0].start()])
    for n, match in enumerate(matches):
        end = matches[n + 1].start() if n + 1 < len(matches) else len(source)
        pieces.append([match.group(0), match.group(2), int(match.group(1)), source[match.end():end]])
    # A macro's expansion puts markers of the same file between the words of a statement: join.
    joined = []
    for marker_text, file, line, text in pieces:
        if joined and joined[-1][1] == file and not re.search(r'" [12]', marker_text):
            last = joined[-1]
            reached = last[2] + last[3].count("\n")
            last[3] += "\n" * (line - reached) + text
        else:
            joined.append([marker_text, file, line, text])
    for marker_text, file, line, text in joined:
        out.append(marker_text)
        project = not file.startswith(("/usr/", "<")) and not file.endswith("cuda_emulator.h")
        out.append(rewrite(text, file, line) if project else text)
    open(sys.argv[2], "w", encoding="utf-8").write("".join(out))


main()
