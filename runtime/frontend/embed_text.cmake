# SOURCE (a text file) -> TARGET (C++ with FUNCTION that returns it). Split, because a string literal has a length limit.
file(READ ${SOURCE} TEXT)
string(LENGTH "${TEXT}" LENGTH)
set(LITERALS "")
set(START 0)
while(START LESS LENGTH)
  string(SUBSTRING "${TEXT}" ${START} 8000 PART)
  string(APPEND LITERALS "R\"blink_page(${PART})blink_page\"\n")
  math(EXPR START "${START} + 8000")
endwhile()
file(WRITE ${TARGET}
  "#include \"frontend/${FUNCTION}.h\"\n\nnamespace blink {\n\nstd::string_view ${FUNCTION}() {\n  return\n${LITERALS};\n}\n\n}  // namespace blink\n")
