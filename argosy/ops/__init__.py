"""Pure math: one public function per op, with several implementations. A plain implementation is the specification of the others."""
