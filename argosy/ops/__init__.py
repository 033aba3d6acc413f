"""Pure maths: one public function per op, with several implementations. A plain one is the specification of the others."""
