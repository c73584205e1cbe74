// Hands a thread's sums in matmul.wgsl to finish(), by four columns or one at a time.
$$ set elements = [""] if out_type == "vec4f" else [".x", ".y", ".z", ".w"]
$$ for i in range(thread_m if row_terms else 0)
    let held{{ i }} = hold({{ row_at(i) }});
    var terms{{ i }} = vec3f();
$$ endfor
$$ for i in range(thread_m)
$$ for g in range(gn)
$$ for e in elements
    {{ "terms%d += " % i if row_terms }}{{ mine }}finish({{ part }}{{ row_at(i) }}, {{ col_at(g) }}{{ " + %du" % loop.index0 if e }}, {{ sums }}{{ i }}_{{ g }}{{ e }}{{ ", held%d" % i if row_terms }});
$$ endfor
$$ endfor
$$ endfor
