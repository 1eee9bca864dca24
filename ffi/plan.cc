extern "C" int jfa_version() { return 1; }
