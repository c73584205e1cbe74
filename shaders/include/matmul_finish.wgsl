// Hands a thread's sums in matmul.wgsl to finish(), by four columns or one at a time.
$$ set elements = [""] if out_type == "vec4f" else [".x", ".y", ".z", ".w"]
$$ for i in range(thread_m if row_terms else 0)
    var terms{{ i }} = vec3f();
$$ endfor
$$ for i in range(thread_m)
$$ for g in range(gn)
$$ for e in elements
    {{ "terms%d += " % i if row_terms }}{{ mine }}finish({{ part }}{{ row_at(i) }}, {{ col_at(g) }}{{ " + %du" % loop.index0 if e }}, {{ sums }}{{ i }}_{{ g }}{{ e }});
$$ endfor
$$ endfor
$$ endfor
